"""OpenEnv environments in this process, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal, cast

from twinkle_agentic._aio.bounded import finish
from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs._log_once import log_raised
from twinkle_agentic.envs.base import StepResult, episode_number
from twinkle_agentic.envs.errors import EnvError, EnvTimeoutError, ErrorKind, TwinkleEnvError
from twinkle_agentic.envs.openenv._adapter import ActionMapper, Adapter, Handler, require_one_name
from twinkle_agentic.envs.openenv._bindings import build_action
from twinkle_agentic.envs.openenv._discovery import (
    action_class_of_environment,
    class_made_by,
    find_environment_classes,
    is_network_client,
    missing_arguments,
)
from twinkle_agentic.envs.openenv._guide import field_meanings
from twinkle_agentic.envs.openenv._importing import load_object
from twinkle_agentic.envs.openenv._protocol import describe_raised
from twinkle_agentic.envs.openenv._rendering import start_error
from twinkle_agentic.envs.openenv._reset_kwargs import (
    collect_reset_kwargs,
    fit_to_signature,
    offered_hint,
)
from twinkle_agentic.envs.openenv._results import read_result
from twinkle_agentic.envs.openenv._runners import method, runner_for
from twinkle_agentic.envs.openenv._tool_schemas import (
    action_fields,
    action_kind,
    offered_tools,
    schema_of,
    tool_from_action,
    tools_from_mcp,
)
from twinkle_agentic.tools.text import MAX_TEXT_CHARS
from twinkle_agentic.tools.types import ToolInfo, Trajectory

__all__ = ["OpenEnv"]

logger = logging.getLogger(__name__)


class OpenEnv(Adapter):
    """An OpenEnv environment that lives in this process: no server, no network, no isolation.

    The constructor builds the environment. After a step in which the environment raised its state
    is unknown: every later step says so, `done=True`, until `reset`. Calls that overlap queue in
    order. Not picklable; `EnvPool` builds its own in each worker.

    Args:
        env_name: The environment package. Its Environment class is found by type in
            `<env_name>.server`.
        env_cls: The Environment class or a function that makes one, or `module:Name`, in place of
            `env_name`.
        env_kwargs: Arguments of the Environment's constructor.
        action_cls: The Action class, or `module:Class`; by default the one the Environment or the
            package's client is declared for. Without any, the arguments reach the environment as a
            dict.
        action_mapper: `(tool_name, arguments) -> action`, an Action or a dict of its fields; by
            default the arguments are the fields, or the call of an MCP tool.
        tools: Definitions to show to the model; none by default, so that `EnvTool.from_env` makes
            one `env_action` with the fields of the Action. `"auto"` gives those that a client of
            the same environment has: its MCP tools, `run_python` or `env_action`.
        reset_kwargs: For the environment's `reset`; the attribute may be changed between episodes.
            `user_data` of the trajectory adds to them: `seed`, `episode_id` and what is under
            `reset_kwargs` as if given here, its other keys where the environment takes them.
        observation_renderer: `observation -> str`, in place of the built-in rendering.
        observation_fields: Names of fields and metadata to show, in this order, and no others.
        hide_fields: Names of fields and metadata not to show, and of optional arguments not to
            offer, besides the reward, secrets and what belongs to the grader.
        about: Said first where the first observation is no text of the environment's own; by
            default the name of the environment.
        max_observation_chars: Characters kept of an observation, head and tail; `None` keeps all.
        reset_keys: Keys of `user_data` offered to the environment's `reset`; `None` offers all.
        strict_reset: Fail a reset with a `seed`, an `episode_id` or `reset_kwargs` that the
            environment has no parameter for; else they are left out and listed in
            `info["reset_ignored"]`.
        busy_timeout_s: Seconds to wait for a call that is still running, such as an abandoned step;
            0 does not wait.

    Raises:
        ValueError: `env_name` and `env_cls` both or neither, an argument of the wrong form, or
            `tools="auto"` without an Action class that has fields.
        ImportError: The package is not installed, or its classes cannot be told; the message names
            what was seen.
        EnvError: The environment's constructor raised, or the listing of its tools.

    Example:
        >>> env = OpenEnv(env_name="openspiel_env", env_kwargs={"game_name": "blackjack"})
        >>> env.reset().done
        False
    """

    def __init__(
        self,
        env_name: str | None = None,
        env_cls: str | type | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        action_cls: Any = None,
        action_mapper: ActionMapper | None = None,
        *,
        tools: list[ToolInfo] | Literal["auto"] | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        observation_renderer: Callable[[Any], str] | None = None,
        observation_fields: Iterable[str] | None = None,
        hide_fields: Iterable[str] = (),
        about: str | None = None,
        max_observation_chars: int | None = MAX_TEXT_CHARS,
        reset_keys: Iterable[str] | None = None,
        strict_reset: bool = True,
        busy_timeout_s: float = 30.0,
    ) -> None:
        require_one_name(
            env_name,
            env_cls,
            example="OpenEnv(env_name='openspiel_env', env_kwargs={'game_name': 'blackjack'})",
        )
        if isinstance(tools, str) and tools != "auto":
            raise ValueError(f"tools must be a list, 'auto' or None, found {tools!r}")
        check_limit("busy_timeout_s", busy_timeout_s, allow_zero=True)
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
            unstarted=ErrorKind.ENV,
        )
        self._env_name = env_name
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self._env: Any = None
        self._closing = False
        self._depth = 0

        action_cls = load_object(action_cls, argument="action_cls")
        found: Any = None
        if env_name is not None:
            classes = find_environment_classes(env_name)
            resolved: Any = classes.env_cls
            found = classes.action_cls
        else:
            resolved = load_object(env_cls, argument="env_cls")
            is_class = isinstance(resolved, type)
            if not callable(getattr(resolved, "step", None) if is_class else resolved):
                raise ValueError(
                    f"env_cls must be an Environment class, or a function that makes one, found "
                    f"{resolved!r}" + (", which has no step method" if is_class else "")
                )
            if is_network_client(resolved):
                raise ValueError(
                    f"env_cls must be an Environment class, found {resolved!r}, the client of a "
                    "server: the session lives there, and OpenEnvClient is for that"
                )
        made_class = class_made_by(resolved)
        self._runner = runner_for(object if made_class is None else made_class)
        try:
            self._env = self._runner.run(resolved, **(env_kwargs or {}))
            if made_class is None:  # a function that does not say what it makes
                self._runner = runner_for(cast("type[Any]", type(self._env)))
            if not callable(getattr(self._env, "step", None)):
                raise TypeError(f"it made {self._env!r}, which has no step method")
            if env_name is None and action_cls is None:
                found = action_class_of_environment(cast("type[Any]", type(self._env)))
            self._action_cls: Any = found if action_cls is None else action_cls
            self._schema = schema_of(self._action_cls)
            self._takes_mcp_calls = self._schema is not None and action_kind(self._schema) == "mcp"
            # What an MCP environment offers may depend on the episode.
            self._lists_at_reset = tools == "auto" and self._takes_mcp_calls
            self._tools = self._auto_tools() if tools == "auto" else list(tools or [])
        except BaseException as error:
            made = self._env is not None
            self._close_now()
            if not isinstance(error, Exception) or (made and isinstance(error, ValueError)):
                raise
            doing = "listing the tools of" if made else "making"
            raise EnvError(
                f"{doing} {getattr(resolved, '__name__', resolved)} failed with "
                f"env_kwargs={dict(env_kwargs or {})!r}: {type(error).__name__}: {error}"
                + ("" if made else missing_arguments(resolved, env_kwargs or {}))
            ) from error

    def tools(self) -> list[ToolInfo]:
        """Return the definitions given to the constructor and those registered; none by default."""
        return self._with_local_tools(self._tools)

    def action_tool(self) -> ToolInfo | None:
        """Return `env_action` with the fields of the Action; `None` where there is no Action."""
        if self._schema is None:
            return None
        return tool_from_action(self._schema, env_name=self._env_name, hide=self._hide)

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode.

        Args:
            trajectory: Its `user_data` adds to `reset_kwargs`.

        Returns:
            The first observation, with `info["metadata"]`.

        Raises:
            EnvError: The environment raised, could not start an episode, or takes no such argument.
            EnvTimeoutError: A call of before is still running after `busy_timeout_s`.
        """
        with self._turn():
            # Whatever happens from here on, the old episode is over.
            self._episode.lose("the reset failed", kind=ErrorKind.ENV)
            kwargs = collect_reset_kwargs(
                self.reset_kwargs, cast("Mapping[str, Any] | None", trajectory), self._reset_keys
            )
            reset = method(self._env, "reset")
            arguments, ignored = fit_to_signature(reset, kwargs, strict=self._strict_reset)
            left_out = [name for name in kwargs.offered if name not in arguments]
            try:
                returned = self._runner.run(reset, **arguments)
            except Exception as error:
                log_raised(error, f"the reset of the environment {type(self._env).__name__}")
                raise EnvError(
                    f"reset of {type(self._env).__name__} with {sorted(arguments)} failed: "
                    f"{type(error).__name__}: {error}"
                    f"{offered_hint(kwargs.offered.keys() & arguments.keys())}"
                ) from error
            result = read_result(returned)
            said = start_error(result.observation, done=result.done, metadata=result.metadata)
            if said is not None:
                raise EnvError(f"the environment could not start an episode: {said}")
            if self._lists_at_reset:
                self._tools = self._auto_tools()
            text, images = self._rendered(
                result.observation,
                result.observation,
                meanings=field_meanings(schema_of(type(result.observation))),
            )
            self._last_result = returned
            self._episode.begin(done=result.done)
            info: dict[str, Any] = {"metadata": result.metadata, "episode_reward": 0.0}
            if images:
                info["images"] = images
            notes = {"reset_ignored": ignored, "reset_not_taken": sorted(left_out)}
            info.update({name: value for name, value in notes.items() if value})
            return StepResult.scored(text, result.reward, done=result.done, info=info)

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one action; never raises for what the model or the environment does.

        Args:
            tool_name: A name from `tools()`; any name where there are none.
            arguments: The fields of the action, unless `action_mapper` says otherwise.

        Returns:
            `info` holds `episode_reward` and `metadata`. Arguments that make no action are
            `done=False` with `error`, and so is a step in which the environment raised, as on a
            server. After an error named in `Env.fatal_errors` it is `done=True` until `reset`.
        """
        number = episode_number(self)
        try:
            with self._turn():
                if episode_number(self) != number:  # an abandoned call that waited through a reset
                    raise EnvError("the env was reset while this step waited: nothing was executed")
                return self._step(tool_name, arguments)
        except TwinkleEnvError as error:
            return StepResult.failed(error, episode_reward=self._episode.reward)

    async def astep(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one action in a thread; as `step`. Cancelled, it leaves the episode lost."""
        try:
            return await run_blocking(self.step, tool_name, arguments)
        except asyncio.CancelledError:
            self._episode.lose("a step was cancelled while it ran", kind=ErrorKind.ENV)
            raise

    def execute(self, action: Any) -> Any:
        """Run an action for scoring and return what the environment returned.

        Neither `episode_reward` nor the episode's `done` changes.

        Args:
            action: An Action, or a dict of its fields.

        Raises:
            ActionRefusedError: The fields make no action.
            EnvError: There is no episode, or the environment raised.
            EnvTimeoutError: A call of before is still running after `busy_timeout_s`.
        """
        with self._turn():
            if self._episode.lost is not None:
                raise EnvError(f"there is no episode, call reset: {self._episode.lost}")
            try:
                returned = self._runner.run(method(self._env, "step"), self._as_action(action))
            except TwinkleEnvError:
                raise
            except BaseException as error:
                if self._is_fatal(error):
                    self._episode.lose(f"the environment raised {error!r}", kind=ErrorKind.ENV)
                if not isinstance(error, (Exception, SystemExit)):
                    raise
                raise EnvError(f"{type(error).__name__}: {error}") from error
            self._last_result = returned
            return returned

    def close(self) -> None:
        """Close the environment; a running call is waited for, up to `busy_timeout_s`.

        Raises:
            EnvTimeoutError: It still runs. The environment is closed as soon as it returns.
        """
        if self._env is None:
            return
        self._closing = True
        self._episode.lose("the env is closed", kind=ErrorKind.ENV, retryable=False)
        with self._turn(closing=True):
            self._close_now()

    @property
    def env(self) -> Any:
        """The environment itself; `None` once closed."""
        return self._env

    def _step(self, tool_name: str, arguments: dict[str, Any] | None) -> StepResult:
        arguments = {} if arguments is None else arguments
        answer = self._checked(tool_name, arguments, any_name=False)
        if isinstance(answer, StepResult):
            return answer
        if answer is not None:
            return self._handle(answer, arguments)
        try:
            action = self._action_of(tool_name, arguments)
        except Exception as error:
            return self._episode.failed(error, kind=ErrorKind.TOOL)
        try:
            returned = self._runner.run(method(self._env, "step"), action)
            result = read_result(returned)
        except BaseException as error:
            if not self._is_fatal(error):  # the model may recover, as on a server
                log_raised(error, f"the step of {type(self._env).__name__}")
                return self._raised(describe_raised(str(error)), arguments)
            reason = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            self._episode.lose(f"the environment raised {reason}", kind=ErrorKind.ENV)
            if not isinstance(error, (Exception, SystemExit)):
                raise
            log_raised(error, f"the step of {type(self._env).__name__}")
            return StepResult.failed(
                f"the environment raised {reason}; its state is unknown, call reset",
                kind=ErrorKind.ENV,
                retryable=True,
                episode_reward=self._episode.reward,
            )
        self._last_result = returned
        note = self._not_offered(arguments)
        try:
            text, images = self._rendered(result.observation, result.observation, note=note)
        except Exception as error:
            return self._episode.failed(error, kind=ErrorKind.ENV)
        return self._scored(
            text,
            result.observation,
            images=images,
            reward=result.reward,
            done=result.done,
            metadata=result.metadata,
        )

    def _is_fatal(self, error: BaseException) -> bool:
        fatal = (TwinkleEnvError, TimeoutError, ConnectionError, *self.fatal_errors)
        return not isinstance(error, Exception) or isinstance(error, fatal)

    def _handle(self, handler: Handler, arguments: dict[str, Any]) -> StepResult:
        try:
            value = finish(handler(self, arguments))
        except Exception as error:
            return self._episode.failed(error, kind=ErrorKind.TOOL)
        return self._handled(value)

    def _action_of(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        if self._action_mapper is not None:
            return self._as_action(self._action_mapper(tool_name, arguments))
        fields = action_fields(
            tool_name, arguments, self._schema, takes_mcp_calls=self._takes_mcp_calls
        )
        return self._as_action(fields)

    def _as_action(self, action: Any) -> Any:
        if self._action_cls is None or not isinstance(action, Mapping):
            return action
        return build_action(self._action_cls, cast("Mapping[str, Any]", action))

    def _auto_tools(self) -> list[ToolInfo]:
        if self._takes_mcp_calls:
            from openenv.core.env_server.mcp_types import ListToolsAction

            listed = self._runner.run(method(self._env, "step"), ListToolsAction())
            entries = cast("list[Any]", getattr(listed, "tools", []) or [])
            return tools_from_mcp([tool.model_dump() for tool in entries])
        if self._schema is None:
            raise ValueError(
                f"tools='auto' needs an Action class with fields, found {self._action_cls!r}: "
                "pass action_cls, or tools as a list"
            )
        return offered_tools(self._schema, env_name=self._env_name, hide=self._hide)

    def _shown_tools(self) -> list[ToolInfo]:
        tools = self.tools()
        action = None if tools else self.action_tool()
        return [action] if action is not None else tools

    @contextlib.contextmanager
    def _turn(self, *, closing: bool = False) -> Generator[None]:
        """Use the environment, one caller at a time; the last one out does a close that is due."""
        if not self._lock.acquire(timeout=self._busy_timeout_s):
            raise EnvTimeoutError(
                "the environment is still busy with an earlier call after "
                f"busy_timeout_s={self._busy_timeout_s:g}"
                + ("; it is closed as soon as that returns" if closing else "")
            )
        try:
            self._depth += 1
            if (self._closing or self._env is None) and not closing and self._depth == 1:
                raise EnvError("the env is closed: make a new one")
            yield
        finally:
            self._depth -= 1
            self._lock.release()
            # Looked at after the release, so that whoever waits for the lock sees it or this does.
            if self._closing and self._env is not None and self._lock.acquire(blocking=False):
                try:
                    if self._depth == 0:
                        self._close_now()
                finally:
                    self._lock.release()

    def _close_now(self) -> None:
        env, self._env = self._env, None
        close = getattr(env, "close", None)
        try:
            if callable(close):
                self._runner.run(close)
        except Exception:  # it is gone either way, and there is nobody to handle it
            logger.warning("closing %s failed", type(env).__name__, exc_info=True)
        finally:
            self._runner.close()
