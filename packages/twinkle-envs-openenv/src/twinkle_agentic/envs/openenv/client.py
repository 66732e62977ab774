"""Client of OpenEnv servers: one `OpenEnvClient` is one session.

Nothing is connected before the first `reset`. All clients of a process share one background thread.
"""

from __future__ import annotations

import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic._aio.bounded import finish, finish_async
from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import EnvError, ErrorKind, SessionClosedError, TwinkleEnvError
from twinkle_agentic.envs.openenv._adapter import ActionMapper, Adapter, Handler, require_one_name
from twinkle_agentic.envs.openenv._background import on_background
from twinkle_agentic.envs.openenv._config import ConnectionConfig, server_addresses
from twinkle_agentic.envs.openenv._protocol import MAX_ACTION_BYTES, MessageType, encode
from twinkle_agentic.envs.openenv._remote_env import RemoteEnv
from twinkle_agentic.envs.openenv._rendering import start_error
from twinkle_agentic.envs.openenv._reset_kwargs import (
    ResetKwargs,
    collect_reset_kwargs,
    offered_hint,
)
from twinkle_agentic.envs.openenv._results import metadata_of
from twinkle_agentic.envs.openenv._servers import Servers
from twinkle_agentic.envs.openenv._session import Session
from twinkle_agentic.envs.openenv.errors import ActionRefusedError, ServerError
from twinkle_agentic.tools.text import MAX_TEXT_CHARS
from twinkle_agentic.tools.types import ToolInfo, Trajectory

__all__ = ["OpenEnvClient"]


class OpenEnvClient(Adapter):
    """An env that lives on an OpenEnv server, reached over its websocket protocol.

    Construct it (nothing is connected), `reset`, `step` until done, `reset` for the next episode in
    the same session, `close`. After a failure that loses the session (timeout, cancelled step,
    broken connection) every step says so, `done=True`, until `reset` opens a new session; there is
    never a fresh session unasked. A client that is forgotten is closed when it is collected, or
    when the interpreter exits. Not picklable. Any thread and any event loop may use it; requests
    that overlap queue in order.

    Args:
        env_name: The environment package. Where it is installed (with `openenv`), its client and
            Action classes are used; where not, plain dicts checked against the server's `GET
            /schema`. `reset` says which in `info["client_class"]`. Reward and done are the server's
            own, whatever the client class makes of them.
        env_cls: The client class, or `module:Class`, in place of `env_name`.
        base_url: `http(s)://` or `ws(s)://`; by default `$OPENENV_BASE_URL`. With several (in the
            variable with commas between), each new session goes to the server with the most room,
            or past one that is down; a session stays where it is.
        action_cls: The Action class, or `module:Class`; by default the one the client class is
            declared for.
        action_mapper: `(tool_name, arguments) -> action`, an Action or a dict of its fields; by
            default the arguments are the fields, or the call of an MCP tool.
        tools: Definitions to show to the model; other names are then refused. By default
            `run_python(code)` where the server's action takes code or it has no `/schema`; for any
            other server what it offers: its MCP tools, else one `env_action` with the fields of its
            action, or with any where these cannot be known. Where there is one action, any name
            stands for it.
        reset_kwargs: For the server's `reset`; the attribute of that name may be changed between
            episodes.
            `user_data` of the trajectory adds to them: `seed`, `episode_id` and what is under
            `reset_kwargs` as if given here, its other keys where the environment takes them.
        connect_timeout_s: Seconds for the connection and handshake.
        message_timeout_s: Seconds for one answer, also that of `reset`.
        client_kwargs: Arguments of OpenEnv's client constructor. `headers`, `max_message_size_mb`,
            `websocket_ping_interval_s` and `websocket_ping_timeout_s` are heeded here too.
        capacity_timeout_s: Seconds `reset` waits for a free session on a full server; 0 takes the
            first refusal.
        close_timeout_s: Seconds for the close handshake; `close` never takes longer.
        ping_interval_s: Seconds between keepalive pings; `None` sends none.
        ping_timeout_s: Seconds without a pong after which the server counts as dead. By default
            `message_timeout_s`: a server that a long step keeps from answering pings may still
            answer.
        max_message_bytes: Largest answer taken; a larger one loses the session.
        max_action_bytes: Largest message sent; a larger action is refused and the session lives.
        headers: Extra HTTP headers.
        token: Secret of the server, sent as `Authorization: Bearer ...`; by default
            `$OPENENV_TOKEN`.
        proxy: `True` asks the environment (`HTTP_PROXY`...), `None` uses none, a URL is the proxy.
            A server on this machine is reached without asking the environment.
        observation_renderer: `observation -> str`, in place of the built-in rendering.
        observation_fields: Names of fields and metadata to show, in this order, and no others.
        hide_fields: Names of fields and metadata not to show, and of optional arguments not to
            offer, besides the reward, secrets and what belongs to the grader.
        about: Said first where the first observation is no text of the environment's own; by
            default the name of the environment.
        max_observation_chars: Characters kept of an observation, head and tail; `None` keeps all.
        reset_keys: Keys of `user_data` offered to the server's `reset`; `None` offers all.
        strict_reset: Of no effect here; `OpenEnv` has it. What a server does with an argument of
            `reset` cannot be known; see `info["reset_ignored"]` and `info["reset_unverified"]` in
            `reset`.

    Raises:
        ValueError: `env_name` and `env_cls` both or neither; no or a bad address; a limit out of
            range.

    Example:
        >>> with OpenEnvClient(env_name="coding_env", base_url="http://10.0.0.5:8000") as env:
        ...     env.reset()
        ...     print(env.step("run_python", {"code": "print(1 + 1)"}).observation)
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: str | type | None = None,
        base_url: str | Sequence[str] | None = None,
        action_cls: Any = None,
        action_mapper: ActionMapper | None = None,
        tools: list[ToolInfo] | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 120.0,
        client_kwargs: Mapping[str, Any] | None = None,
        *,
        capacity_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
        ping_interval_s: float | None = 20.0,
        ping_timeout_s: float | None = None,
        max_message_bytes: int = 100 * 2**20,
        max_action_bytes: int = MAX_ACTION_BYTES,
        headers: Mapping[str, str] | None = None,
        token: str | None = None,
        proxy: str | bool | None = True,
        observation_renderer: Callable[[Any], str] | None = None,
        observation_fields: Iterable[str] | None = None,
        hide_fields: Iterable[str] = (),
        about: str | None = None,
        max_observation_chars: int | None = MAX_TEXT_CHARS,
        reset_keys: Iterable[str] | None = None,
        strict_reset: bool = True,
    ) -> None:
        require_one_name(
            env_name,
            env_cls,
            example="OpenEnvClient(env_name='coding_env', base_url='http://10.0.0.5:8000')",
        )
        addresses = server_addresses(base_url)
        check_count("max_action_bytes", max_action_bytes)
        config = ConnectionConfig.of(
            token=token,
            client_kwargs=client_kwargs or {},
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=message_timeout_s,
            capacity_timeout_s=capacity_timeout_s,
            close_timeout_s=close_timeout_s,
            ping_interval_s=ping_interval_s,
            ping_timeout_s=ping_timeout_s,
            max_message_bytes=max_message_bytes,
            headers=headers,
            proxy=proxy,
        )
        super().__init__(
            action_mapper=action_mapper,
            reset_kwargs=reset_kwargs,
            observation_renderer=observation_renderer,
            observation_fields=observation_fields,
            hide_fields=hide_fields,
            about=about,
            env=env_name or env_cls,
            max_observation_chars=max_observation_chars,
            reset_keys=reset_keys,
            strict_reset=strict_reset,
            unstarted=ErrorKind.SESSION_LOST,
        )
        self.url = base_url if isinstance(base_url, str) else addresses[0].http_url
        self.message_timeout_s = message_timeout_s
        self._tools = None if tools is None else list(tools)
        self._max_action_bytes = max_action_bytes
        servers = Servers(addresses, config)
        self._session = Session(servers, config)
        self._remote = RemoteEnv(
            servers,
            config,
            env_name=env_name,
            env_cls=env_cls,
            action_cls=action_cls,
            client_kwargs=client_kwargs or {},
            hide_fields=self._hide,
        )
        # The session knows nothing of this object, so it can be closed when this is collected.
        weakref.finalize(self, Session.drop, self._session).atexit = False

    def tools(self) -> list[ToolInfo]:
        """Return the definitions shown to the model.

        Before the first `reset`, and with `tools=None`, the server is asked.

        Raises:
            TwinkleEnvError: It cannot be asked.
        """
        if self._tools is None and self._remote.tools is None:
            run_sync(self._discover_tools())
        own = (self._remote.tools or []) if self._tools is None else self._tools
        return self._with_local_tools(own)

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode, in the open session or, without one, in a new one.

        Args:
            trajectory: Its `user_data` adds to `reset_kwargs`.

        Returns:
            The first observation. `info`: `metadata`, `client_class` (`None` where plain dicts are
            used, and `client_note` says why); and where they are not empty, `schema_error` (why the
            fields of the action are not known: `GET /schema` failed, or the action class has no
            JSON Schema), `reset_ignored` (`episode_id`, where the state shows another one),
            `reset_unverified` (other arguments whose value the state does not show) and
            `reset_not_taken` (data of the trajectory that is no JSON, and is not sent).
            `reset_ignored` and `reset_unverified` are found out once for each set of argument
            names.

        Raises:
            CapacityError: The server stayed full for `capacity_timeout_s`.
            EnvTimeoutError: No handshake or no answer in time.
            SessionClosedError: The server cannot be reached, or broke the connection.
            EnvError: The environment could not be built, or raised.
            ActionRefusedError: The arguments are no JSON, too large, or were refused.
        """
        kwargs, left_out = self._reset_arguments(trajectory)
        return self._started(*run_sync(self._start(kwargs)), left_out)

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode; as `reset`, without blocking the event loop."""
        kwargs, left_out = self._reset_arguments(trajectory)
        return self._started(*await on_background(self._start(kwargs)), left_out)

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one tool; never raises for what the model, the environment or the network does.

        Args:
            tool_name: A name from `tools()`; anything else is an observation of the error.
            arguments: For the tool.

        Returns:
            `info` holds `episode_reward` and `metadata`. A bad action or an error inside the
            environment is `done=False` with `error`; a lost session is `done=True` with
            `error_kind` `timeout` or `session_lost`, again at every later step until `reset`.
        """
        plan = self._plan(tool_name, arguments)
        if isinstance(plan, StepResult):
            return plan
        try:
            if isinstance(plan, bytes):
                answer = self._session.request_sync(MessageType.STEP, plan)
                return self._taken(answer, arguments or {})
            value = plan(self, arguments or {})
            return self._handled(finish(value))
        except Exception as error:
            return self._failed(error, tool_name, arguments)

    async def astep(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one tool; as `step`, without blocking the event loop."""
        plan = self._plan(tool_name, arguments)
        if isinstance(plan, StepResult):
            return plan
        try:
            if isinstance(plan, bytes):
                answer = await self._session.request(MessageType.STEP, plan)
                return self._taken(answer, arguments or {})
            if inspect.iscoroutinefunction(plan):
                return self._handled(await finish_async(plan(self, arguments or {})))
            value = await run_blocking(plan, self, arguments or {})
            return self._handled(await finish_async(value))
        except Exception as error:
            return self._failed(error, tool_name, arguments)

    def execute(self, action: Any) -> Any:
        """Send an action for scoring and return the server's answer as it is.

        Neither `episode_reward` nor the episode's `done` changes.

        Args:
            action: An Action, or a dict of its fields.

        Returns:
            An object with `observation`, `reward`, `done`: the client class's own, or a
            `RawResult`. Either way a field is an attribute: `result.observation.exit_code`.

        Raises:
            ActionRefusedError: The action does not fit or is too large; the session lives.
            ServerError: The environment raised.
            EnvTimeoutError: No answer within `message_timeout_s`; the session is lost.
            SessionClosedError: There is no session.
        """
        frame = self._action_frame(action)
        return self._raw(self._session.request_sync(MessageType.STEP, frame))

    async def aexecute(self, action: Any) -> Any:
        """Send an action for scoring; as `execute`, without blocking the event loop."""
        frame = self._action_frame(action)
        return self._raw(await self._session.request(MessageType.STEP, frame))

    async def aexecute_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send the fields of an action as they are, and return the answer as it came.

        As `aexecute`, but past the client class, which may drop fields (`metadata` above all).

        Raises as `execute`.
        """
        self._check_episode()
        frame = encode(MessageType.STEP, dict(fields), max_bytes=self._max_action_bytes)
        return await self._session.request(MessageType.STEP, frame)

    def state(self) -> Any:
        """Return the state of the server-side environment: a typed object, or its fields.

        Raises as `execute`.
        """
        self._check_episode()
        data = self._session.request_sync(MessageType.STATE, encode(MessageType.STATE, None))
        return self._remote.binding.parse_state(data)

    def close(self) -> None:
        """End the session within `close_timeout_s`; `reset` opens a new one."""
        run_sync(self._session.close())
        self._episode.lose("the client is closed")

    async def aclose(self) -> None:
        """End the session; as `close`, without blocking the event loop."""
        await on_background(self._session.close())
        self._episode.lose("the client is closed")

    @property
    def client(self) -> SessionClient:
        """The session's synchronous API: `reset`, `step`, `state`, `close`."""
        return SessionClient(self)

    def _reset_with(self, kwargs: Mapping[str, Any]) -> Any:
        """Start an episode with these arguments alone and return the server's answer."""
        self._episode.lose("the reset failed")
        self._started(*run_sync(self._start(ResetKwargs(explicit=dict(kwargs)))), [])
        return self._last_result

    def _reset_arguments(self, trajectory: Trajectory | None) -> tuple[ResetKwargs, list[str]]:
        """Return the arguments of a reset, and the offered ones that cannot be sent."""
        # Whatever happens from here on, the old episode is over.
        self._episode.lose("the reset failed")
        kwargs = collect_reset_kwargs(
            self.reset_kwargs, cast("Mapping[str, Any] | None", trajectory), self._reset_keys
        )
        unsendable = [name for name, value in kwargs.offered.items() if not _is_json(value)]
        for name in unsendable:
            del kwargs.offered[name]
        return kwargs, unsendable

    async def _discover_tools(self) -> None:
        """Ask the server for its tools, before any episode."""
        await self._remote.bind()
        await self._remote.list_tools(self._session, running=False)

    async def _start(self, kwargs: ResetKwargs) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Start an episode; returns the first answer, and notes on the arguments."""
        data = {**kwargs.offered, **kwargs.explicit}
        frame = encode(MessageType.RESET, data, max_bytes=self._max_action_bytes)
        await self._remote.bind()
        try:
            answer = await self._session.start(MessageType.RESET, frame)
        except ServerError as error:
            if error.session_lives and kwargs.offered:
                raise ServerError(
                    f"{error}{offered_hint(kwargs.offered)}",
                    code=error.code,
                    session_lives=True,
                    kind=error.kind,
                ) from error
            raise
        await self._remote.check_fit(answer)
        if self._tools is None:
            await self._remote.list_tools(self._session, running=True)
        return answer, await self._remote.verify(self._session, kwargs.explicit)

    def _started(
        self, data: dict[str, Any], verified: dict[str, list[str]], left_out: list[str]
    ) -> StepResult:
        raw = self._remote.binding.parse_result(data)
        metadata = metadata_of(data, data.get("observation"))
        said = start_error(data.get("observation"), done=bool(raw.done), metadata=metadata)
        if said is not None:
            raise EnvError(f"the environment could not start an episode: {said}")
        self._episode.begin(done=bool(raw.done))
        info: dict[str, Any] = {
            "metadata": metadata,
            "client_class": self._remote.binding.name,
            "episode_reward": 0.0,
        }
        notes = {
            "client_note": self._remote.note,
            "schema_error": self._remote.schema_error,
            **verified,
            "reset_not_taken": sorted(left_out),
        }
        info.update({key: value for key, value in notes.items() if value})
        self._last_result = raw
        text, images = self._rendered(
            raw.observation, data.get("observation"), meanings=self._remote.field_meanings
        )
        if images:
            info["images"] = images
        return StepResult.scored(text, raw.reward, done=bool(raw.done), info=info)

    def _plan(
        self, tool_name: str, arguments: dict[str, Any] | None
    ) -> StepResult | bytes | Handler:
        """Turn a call into a frame to send, a local handler to run, or the result of neither."""
        arguments = {} if arguments is None else arguments
        any_name = self._tools is None and (
            self._action_mapper is not None or self._remote.takes_any_tool_name
        )
        answer = self._checked(tool_name, arguments, any_name=any_name)
        if answer is not None:
            return answer
        try:
            action: Any = (
                self._remote.default_action(tool_name, arguments)
                if self._action_mapper is None
                else self._action_mapper(tool_name, arguments)
            )
        except Exception as error:
            return self._episode.failed(
                f"the arguments of {tool_name!r} make no action: {type(error).__name__}: {error}",
                kind=ErrorKind.TOOL,
            )
        try:
            return self._action_frame(action)
        except ActionRefusedError as error:
            return self._episode.failed(error)

    def _check_episode(self) -> None:
        if self._episode.lost is not None:
            raise SessionClosedError(f"there is no episode, call reset: {self._episode.lost}")

    def _action_frame(self, action: Any) -> bytes:
        self._check_episode()
        payload = self._remote.binding.to_payload(action)
        return encode(MessageType.STEP, payload, max_bytes=self._max_action_bytes)

    def _raw(self, data: dict[str, Any]) -> Any:
        self._last_result = self._remote.binding.parse_result(data)
        return self._last_result

    def _taken(self, data: dict[str, Any], arguments: Mapping[str, Any]) -> StepResult:
        raw = self._raw(data)
        note = self._not_offered(arguments)
        text, images = self._rendered(raw.observation, data.get("observation"), note=note)
        return self._scored(
            text,
            data.get("observation"),
            images=images,
            reward=raw.reward,
            done=bool(raw.done),
            metadata=metadata_of(data, data.get("observation")),
        )

    def _failed(
        self, error: Exception, tool_name: str, arguments: Mapping[str, Any] | None
    ) -> StepResult:
        if not isinstance(error, TwinkleEnvError):  # a handler or a renderer raised
            kind = ErrorKind.TOOL if tool_name in self._local else ErrorKind.ENV
            return self._episode.failed(error, kind=kind)
        if self._session.is_open:
            if isinstance(error, ActionRefusedError):
                return self._episode.failed(self._remote.explained(error))
            if isinstance(error, ServerError) and error.code == "EXECUTION_ERROR":
                return self._raised(str(error), arguments or {})
            return self._episode.failed(error)
        self._episode.lose(str(error))
        return StepResult.failed(error, episode_reward=self._episode.reward)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


class SessionClient:
    """`reset`, `step`, `state` and `close` of one session, with the server's answers as they are.

    It shares the session of its env: same episode, same queue. None of it touches `episode_reward`
    but `reset`.
    """

    def __init__(self, env: OpenEnvClient) -> None:
        self._env = env
        self.step = env.execute
        self.state = env.state
        self.close = env.close

    def reset(self, **kwargs: Any) -> Any:
        """Start a new episode with these arguments alone; raises as `OpenEnvClient.reset`."""
        return self._env._reset_with(kwargs)  # pyright: ignore[reportPrivateUsage]
