"""OpenEnv environments in this process, without a server."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, cast

from twinkle_agentic.envs.base import Env, StepResult, episode_number
from twinkle_agentic.envs.errors import EnvError, EnvTimeoutError, ErrorKind, TwinkleEnvError
from twinkle_agentic.envs.openenv.bindings import build_action
from twinkle_agentic.envs.openenv.discovery import (
    action_class_of_environment,
    find_environment_classes,
)
from twinkle_agentic.envs.openenv.episode import Episode
from twinkle_agentic.envs.openenv.importing import load_object
from twinkle_agentic.envs.openenv.in_process import InProcessResult, read_result
from twinkle_agentic.envs.openenv.local_tools import Handler, LocalTools
from twinkle_agentic.envs.openenv.rendering import mcp_error, render_observation, start_error
from twinkle_agentic.envs.openenv.reset_kwargs import collect_reset_kwargs, fit_to_signature
from twinkle_agentic.envs.openenv.runners import method, runner_for
from twinkle_agentic.envs.openenv.tool_schemas import (
    action_kind,
    mcp_call,
    tool_from_action,
    tools_from_mcp,
)
from twinkle_agentic.envs.openenv.tool_schemas import (
    tool_name as name_of,
)
from twinkle_agentic.envs.text import MAX_TEXT_CHARS, to_text, truncate_middle
from twinkle_agentic.tools.threads import run_blocking
from twinkle_agentic.tools.types import ToolInfo, Trajectory

__all__ = ["OpenEnv"]

logger = logging.getLogger(__name__)

ActionMapper = Callable[[str, dict[str, Any]], Any]


class OpenEnv(Env):
    """An OpenEnv environment that lives in this process: no server, no network, no isolation.

    The constructor builds the environment. After a step in which the environment raised its state is unknown:
    every later step says so, `done=True`, until `reset`. Calls that overlap queue in order. Not picklable;
    `EnvPool` builds its own in each worker.

    Args:
        env_name: The environment package. Its Environment class is found by type in `<env_name>.server`.
        env_cls: The Environment class, or `module:Class`, in place of `env_name`.
        env_kwargs: Arguments of the Environment's constructor.
        action_cls: The Action class, or `module:Class`; by default the one the Environment or the package's client
            is declared for. Without any, the arguments reach the environment as a dict.
        action_mapper: `(tool_name, arguments) -> action`, an Action or a dict of its fields; by default the
            arguments are the fields, or the call of an MCP tool.
        tools: Definitions to show to the model; none by default, so that `EnvTool.from_env` makes one `env_action`.
            `"auto"` derives them from the MCP tools or the fields of the Action.
        reset_kwargs: For the environment's `reset`; the attribute may be changed between episodes. `user_data` of
            the trajectory adds to them (`twinkle_agentic.envs.openenv.reset_kwargs`).
        observation_renderer: `observation -> str`, in place of the built-in rendering.
        max_observation_chars: Characters kept of an observation, head and tail; `None` keeps all.
        reset_keys: Keys of `user_data` offered to the environment's `reset`; `None` offers all.
        strict_reset: Fail a reset with a `seed`, an `episode_id` or `reset_kwargs` that the environment has no
            parameter for; else they are left out and listed in `info["reset_ignored"]`.
        busy_timeout_s: Seconds to wait for a call that is still running, such as an abandoned step.

    Raises:
        ValueError: `env_name` and `env_cls` both or neither, or an argument of the wrong form.
        ImportError: The package is not installed, or its classes cannot be told; the message names what was seen.
        EnvError: The environment's constructor raised.

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
        max_observation_chars: int | None = MAX_TEXT_CHARS,
        reset_keys: Iterable[str] | None = None,
        strict_reset: bool = True,
        busy_timeout_s: float = 30.0,
    ) -> None:
        if (env_name is None) == (env_cls is None):
            raise ValueError(
                f"give either env_name or env_cls, found env_name={env_name!r} and env_cls={env_cls!r}: "
                "for example OpenEnv(env_name='openspiel_env', env_kwargs={'game_name': 'blackjack'})"
            )
        if isinstance(tools, str) and tools != "auto":
            raise ValueError(f"tools must be a list, 'auto' or None, found {tools!r}")
        self.reset_kwargs: dict[str, Any] = dict(reset_kwargs or {})
        self._env_name = env_name
        self._action_mapper = action_mapper
        self._renderer = observation_renderer
        self._max_chars = max_observation_chars
        self._reset_keys = None if reset_keys is None else list(reset_keys)
        self._strict_reset = strict_reset
        self._busy_timeout_s = busy_timeout_s
        self._local = LocalTools()
        self._lock = threading.RLock()
        self._episode = Episode(lost_kind=ErrorKind.ENV)
        self._last_result: Any = None
        self._env: Any = None

        action_cls = load_object(action_cls, argument="action_cls")
        found: Any = None
        if env_name is not None:
            classes = find_environment_classes(env_name)
            resolved: Any = classes.env_cls
            found = classes.action_cls
        else:
            resolved = load_object(env_cls, argument="env_cls")
            if not callable(getattr(resolved, "step", None)):
                raise ValueError(
                    f"env_cls must be an Environment class, found {resolved!r}, which has no step method"
                )
            if action_cls is None:
                found = action_class_of_environment(resolved)
        self._action_cls: Any = found if action_cls is None else action_cls
        self._runner = runner_for(resolved)
        try:
            self._env = self._runner.run(resolved, **(env_kwargs or {}))
        except Exception as error:
            self._runner.close()
            raise EnvError(
                f"{resolved.__name__}(**env_kwargs) failed with env_kwargs={dict(env_kwargs or {})!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        # What an MCP environment offers may depend on the episode.
        self._lists_at_reset = tools == "auto" and self._takes_mcp_calls()
        self._tools = self._auto_tools() if tools == "auto" else list(tools or [])

    # Tools

    def register_tool(self, tool_info: ToolInfo, handler: Handler) -> Self:
        """Add a tool that does not reach the environment.

        Args:
            tool_info: Its definition; a tool of the same name is overridden.
            handler: `handler(env, arguments)`; its result, as text, is the observation. It may return a
                `StepResult`, whose reward counts.

        Returns:
            The env itself, for further calls.

        Raises:
            ValueError: The definition has no name.
        """
        self._local.register(tool_info, handler)
        return self

    def tools(self) -> list[ToolInfo]:
        """Return the definitions given to the constructor and those registered; none by default."""
        return self._local.merged(self._tools)

    # Episodes

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
            try:
                returned = self._runner.run(reset, **arguments)
            except Exception as error:
                raise EnvError(
                    f"reset of {type(self._env).__name__} with {sorted(arguments)} failed: "
                    f"{type(error).__name__}: {error}"
                ) from error
            result = read_result(returned)
            said = start_error(result.observation, done=result.done, metadata=result.metadata)
            if said is not None:
                raise EnvError(f"the environment could not start an episode: {said}")
            text = self._rendered(result, first=True)
            self._last_result = returned
            if self._lists_at_reset:
                self._tools = self._auto_tools()
            self._episode.begin(done=result.done)
            info: dict[str, Any] = {"metadata": result.metadata, "episode_reward": 0.0}
            if ignored:
                info["reset_ignored"] = ignored
            return StepResult.scored(text, result.reward, done=result.done, info=info)

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one action; never raises for what the model or the environment does.

        Args:
            tool_name: A name from `tools()`; any name where there are none.
            arguments: The fields of the action, unless `action_mapper` says otherwise.

        Returns:
            `info` holds `episode_reward` and `metadata`. Arguments that make no action are `done=False` with
            `error`; an environment that raised is `done=True` until `reset`.
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
                self._episode.lose(f"the environment raised {error!r}", kind=ErrorKind.ENV)
                if not isinstance(error, (Exception, SystemExit)):
                    raise
                raise EnvError(f"{type(error).__name__}: {error}") from error
            self._last_result = returned
            return returned

    def close(self) -> None:
        """Close the environment; a call that is still running is waited for, up to `busy_timeout_s`."""
        if self._env is None:
            return
        self._episode.lose("the env is closed", kind=ErrorKind.ENV, retryable=False)
        with self._turn(closing=True):
            env, self._env = self._env, None
            close = getattr(env, "close", None)
            try:
                if callable(close):
                    self._runner.run(close)
            except Exception:  # it is gone either way, and there is nobody to handle it
                logger.warning("closing %s failed", type(env).__name__, exc_info=True)
            finally:
                self._runner.close()

    @property
    def env(self) -> Any:
        """The environment itself; `None` once closed."""
        return self._env

    @property
    def episode_reward(self) -> float:
        """Sum of the rewards of the episode's steps."""
        return self._episode.reward

    @property
    def last_result(self) -> Any:
        """What the environment returned last, as it is; `None` before the first reset."""
        return self._last_result

    # Helpers

    def _step(self, tool_name: str, arguments: dict[str, Any] | None) -> StepResult:
        if (refusal := self._episode.refusal()) is not None:
            return refusal
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            return self._episode.failed(
                f"the arguments of {tool_name!r} must be an object, found {arguments!r}",
                kind=ErrorKind.TOOL,
            )
        handler = self._local.get(tool_name)
        if handler is not None:
            return self._handle(handler, arguments)
        names = [name_of(tool) for tool in self._tools]
        if names and tool_name not in names:
            known = ", ".join(name_of(tool) for tool in self.tools())
            return self._episode.failed(
                f"there is no tool {tool_name!r}; the tools are {known}", kind=ErrorKind.TOOL
            )
        try:
            action = self._action_of(tool_name, arguments)
        except Exception as error:
            return self._episode.failed(error, kind=ErrorKind.TOOL)
        try:
            returned = self._runner.run(method(self._env, "step"), action)
            result = read_result(returned)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else repr(error)
            self._episode.lose(f"the environment raised {reason}", kind=ErrorKind.ENV)
            if not isinstance(error, (Exception, SystemExit)):
                raise
            return StepResult.failed(
                f"the environment raised {reason}; its state is unknown, call reset",
                kind=ErrorKind.ENV,
                retryable=True,
                episode_reward=self._episode.reward,
            )
        self._last_result = returned
        try:
            text = self._rendered(result)
        except Exception as error:
            return self._episode.failed(error, kind=ErrorKind.ENV)
        scored = self._episode.scored(
            text, result.reward, done=result.done, info={"metadata": result.metadata}
        )
        error_text = mcp_error(result.observation)
        if error_text is not None and result.reward is None:
            scored.info.update(error=error_text, error_kind=str(ErrorKind.TOOL), retryable=False)
        return scored

    def _handle(self, handler: Handler, arguments: dict[str, Any]) -> StepResult:
        try:
            value = handler(self, arguments)
        except Exception as error:
            return self._episode.failed(error, kind=ErrorKind.TOOL)
        if isinstance(value, StepResult):
            return self._episode.scored(
                value.observation, value.reward, done=value.done, info=dict(value.info)
            )
        return StepResult(
            to_text(value, max_chars=self._max_chars),
            info={"episode_reward": self._episode.reward},
        )

    def _action_of(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        if self._action_mapper is not None:
            return self._as_action(self._action_mapper(tool_name, arguments))
        if self._takes_mcp_calls() and not (
            "tool_name" in arguments and set(arguments) <= {"type", "tool_name", "arguments"}
        ):
            arguments = mcp_call(tool_name, arguments, self._action_schema())
        return self._as_action(arguments)

    def _as_action(self, action: Any) -> Any:
        if self._action_cls is None or not isinstance(action, Mapping):
            return action
        return build_action(self._action_cls, cast("Mapping[str, Any]", action))

    def _takes_mcp_calls(self) -> bool:
        schema = self._action_schema()
        return schema is not None and action_kind(schema) == "mcp"

    def _action_schema(self) -> dict[str, Any] | None:
        describe = getattr(self._action_cls, "model_json_schema", None)
        try:
            return cast("dict[str, Any]", describe()) if callable(describe) else None
        except Exception:  # a field that JSON Schema cannot describe, such as a tensor
            return None

    def _auto_tools(self) -> list[ToolInfo]:
        if self._takes_mcp_calls():
            from openenv.core.env_server.mcp_types import ListToolsAction

            listed = self._runner.run(method(self._env, "step"), ListToolsAction())
            entries = cast("list[Any]", getattr(listed, "tools", []) or [])
            return tools_from_mcp([tool.model_dump() for tool in entries])
        schema = self._action_schema()
        if schema is None:
            raise ValueError(
                f"tools='auto' needs an Action class with fields, found {self._action_cls!r}: "
                "pass action_cls, or tools as a list"
            )
        return [tool_from_action(schema, env_name=self._env_name)]

    def _rendered(self, result: InProcessResult, *, first: bool = False) -> str:
        if self._renderer is not None:
            text = to_text(self._renderer(result.observation), max_chars=None)
        else:
            text = render_observation(result.observation, first=first)
        return text if self._max_chars is None else truncate_middle(text, self._max_chars)

    def _turn(self, *, closing: bool = False) -> _Turn:
        return _Turn(self._lock, self._busy_timeout_s, lambda: self._env is None and not closing)


class _Turn:
    """The right to use the environment, one caller at a time."""

    def __init__(
        self, lock: threading.RLock, timeout_s: float, is_closed: Callable[[], bool]
    ) -> None:
        self._lock, self._timeout_s, self._is_closed = lock, timeout_s, is_closed

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise EnvTimeoutError(
                f"the environment is still busy with an earlier call after busy_timeout_s={self._timeout_s:g}"
            )
        if self._is_closed():
            self._lock.release()
            raise EnvError("the env is closed: make a new one")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
