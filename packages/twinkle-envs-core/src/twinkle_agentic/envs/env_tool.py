"""An environment's actions as tools.

The tools made by one `EnvTool.from_env` share one episode record: whichever acted last, `done`,
`episode_reward` and `last_result` are the environment's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from twinkle_agentic._aio.bounded import is_cancelled, is_ctrl_c
from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs._log_once import log_raised
from twinkle_agentic.envs.base import Env, StepResult, as_step_result, episode_number
from twinkle_agentic.envs.errors import ErrorKind, TwinkleEnvError
from twinkle_agentic.tools._outcome import what_was_raised
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.types import Message, ToolInfo

__all__ = ["EnvTool", "EpisodeRecord"]

# One for all records, which stay plain data; it is held for a few assignments.
_lock = threading.Lock()


@dataclass(slots=True)
class EpisodeRecord:
    """What is known of the running episode of one env; it pickles.

    Attributes:
        last_result: Of the latest step; `None` before the first one of the episode.
        episode_reward: `info["episode_reward"]` where the environment reports it, which is the
            return so far; else the reward of the last step that did not fail, and no sum. A rollout
            adds up the rewards of the steps by itself.
        number: Which episode of the env this is (`episode_number`).
        steps: Results taken in this episode.
    """

    last_result: StepResult | None = None
    episode_reward: float = 0.0
    number: int = 0
    steps: int = 0

    @property
    def done(self) -> bool:
        """Whether the last step ended the episode."""
        return self.last_result is not None and self.last_result.done

    def add(self, result: StepResult) -> None:
        """Take in the result of a step; a failed one leaves the reward earned so far."""
        self.last_result = result
        self.steps += 1
        if "episode_reward" in result.info:
            self.episode_reward = float(result.info["episode_reward"])
        elif result.error is None:
            self.episode_reward = result.reward

    def clear(self, number: int) -> None:
        """Forget the last episode."""
        self.last_result, self.episode_reward = None, 0.0
        self.number, self.steps = number, 0


class EnvTool(Tool):
    """One action of an env as a `Tool`.

    After the step that ended the episode the env is not stepped again; the call is answered with a
    text that says so, until the env is reset. (The resets of an env that is no `Env` are not seen:
    call `record.clear(0)` after them.)

    Args:
        env: The environment; the caller resets and closes it.
        tool_name: The name the model calls.
        description: For the model.
        parameters: JSON Schema of the arguments; any object by default.
        timeout_s: Seconds a step may take when a `ToolManager` calls. Where the limit passes, the
            episode is over: its state is unknown.
        record: The record to share with other tools of the same env.

    Raises:
        ValueError: `timeout_s` is not above 0.
    """

    def __init__(
        self,
        env: Env,
        tool_name: str = "env_action",
        description: str = "Execute an action in the environment.",
        parameters: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        record: EpisodeRecord | None = None,
    ) -> None:
        check_limit("timeout_s", timeout_s, allow_none=True)
        self.env = env
        self.timeout_s = timeout_s
        self.record = EpisodeRecord(number=episode_number(env)) if record is None else record
        self._stepped: int | None = None  # the episode of the latest step
        self._info: ToolInfo = {
            "type": "function",
            "function": {
                "name": tool_name,
                "description": description,
                "parameters": parameters or {"type": "object", "properties": {}},
            },
        }

    @classmethod
    def from_env(cls, env: Env, *, timeout_s: float | None = None) -> list[EnvTool]:
        """Make one tool for each of `env.tools()`, or a single `env_action` where there are none.

        Its arguments are those of `env.action_tool()`, any object where that does not say.

        Args:
            env: The environment.
            timeout_s: Seconds a step may take, for each tool.

        Raises:
            ValueError: A definition has no name, or `timeout_s` is not above 0.
        """
        record = EpisodeRecord(number=episode_number(env))
        tools: list[EnvTool] = []
        infos = list(env.tools())
        if not infos:
            describe: Any = getattr(
                env, "action_tool", None
            )  # an env of another framework has none
            action = describe() if callable(describe) else None
            infos = [] if action is None else [cast("ToolInfo", action)]
        for info in infos:
            function = _function_of(info, env)
            tool = cls(
                env,
                function["name"],
                function.get("description") or "",
                function.get("parameters"),
                timeout_s=timeout_s,
                record=record,
            )
            definition: Any = tool._info
            definition["function"] = {**function, **definition["function"]}
            tools.append(tool)
        return tools or [cls(env, timeout_s=timeout_s, record=record)]

    @property
    def last_result(self) -> StepResult | None:
        """The latest result of the episode, by whichever tool; `None` before the first step."""
        self._follow_resets()
        return self.record.last_result

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        self._follow_resets()
        return self.record.done

    @property
    def episode_reward(self) -> float:
        """As `EpisodeRecord.episode_reward`; a failed step keeps it."""
        self._follow_resets()
        return self.record.episode_reward

    def tool_info(self) -> ToolInfo:
        """Return the definition shown to the model."""
        return self._info

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Step the env and return the observation.

        What the env raises is a failed step; which exceptions end the episode is said at
        `Env.fatal_errors`.

        Raises:
            KeyboardInterrupt: Ctrl-C during the step; the episode ends.
        """
        return str(self._step(tool_name, arguments))

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Step the env through its async twin and return the observation; as a call."""
        return str(await self._astep(tool_name, arguments))

    def call_value(self, tool_name: str, arguments: dict[str, Any]) -> StepResult | str:
        """Step the env and return the result; as `acall_value`."""
        if type(self).__call__ is not EnvTool.__call__:  # a subclass with a step of its own
            return self(tool_name, arguments)
        return self._step(tool_name, arguments)

    def _step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult | str:
        if (refusal := self._refusal()) is not None:
            return refusal
        number = self._begin()
        try:
            result = as_step_result(self.env.step(tool_name, arguments))
        except BaseException as error:
            if is_ctrl_c(error):
                self.abandon("the step was interrupted")
                raise
            result = self._failed(error, "step")
        return self._take(number, result)

    async def acall_value(self, tool_name: str, arguments: dict[str, Any]) -> StepResult | str:
        """Step the env through its async twin and return the result.

        An env without one is stepped in a thread. When the call is cancelled the episode ends.

        Returns:
            The step; a text where the episode is over and nothing was executed.
        """
        if type(self).acall is not EnvTool.acall:  # a subclass with a step of its own
            return await self.acall(tool_name, arguments)
        return await self._astep(tool_name, arguments)

    async def _astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult | str:
        if (refusal := self._refusal()) is not None:
            return refusal
        astep: Any = getattr(self.env, "astep", None)
        if astep is None:  # an env of another framework
            return await self._take_step(run_blocking(self.env.step, tool_name, arguments), "step")
        return await self._take_step(astep(tool_name, arguments), "step")

    async def areply(self, message: Message) -> StepResult | None:
        """Let the env answer a message that calls no tool; `None` where it has no answer."""
        areply: Any = getattr(self.env, "areply", None)
        if areply is None or self._refusal() is not None:
            return None
        return await self._take_step(areply(message), "reply", allow_none=True)

    def abandon(self, reason: str) -> StepResult | None:
        """End the episode: a step that is no longer awaited leaves it in an unknown state.

        Returns:
            The failed step; `None` where the episode was over already.
        """
        failed = StepResult.failed(reason, kind=ErrorKind.TIMEOUT, retryable=True)
        with _lock:
            if self._stepped in (None, self.record.number) and not self.record.done:
                self.record.add(failed)
                return failed
        return None

    async def _take_step(self, work: Any, method: str, *, allow_none: bool = False) -> Any:
        number = self._begin()
        try:
            result = await work
            if result is None and allow_none:
                return None
            result = as_step_result(result)
        except asyncio.CancelledError as error:
            if is_cancelled():
                self.abandon(f"the {method} was cancelled")
                raise
            result = self._failed(error, method)
        except BaseException as error:
            # A `GeneratorExit` closes a coroutine that is no longer awaited.
            if is_ctrl_c(error) or isinstance(error, GeneratorExit):
                self.abandon(f"the {method} was interrupted")
                raise
            result = self._failed(error, method)
        return self._take(number, result)

    def _failed(self, error: BaseException, method: str) -> StepResult:
        """Make the result of a step whose env raised; only a fatal error ends the episode."""
        log_raised(error, f"{type(self.env).__name__}.{method}")
        raised = what_was_raised(error)
        named: Any = getattr(self.env, "fatal_errors", ())
        fatal = (TwinkleEnvError, TimeoutError, ConnectionError, *named)
        if isinstance(raised, Exception) and not isinstance(raised, fatal):
            return StepResult.failed(error, kind=ErrorKind.TOOL, done=False)
        if isinstance(raised, TwinkleEnvError):
            return StepResult.failed(raised)
        if isinstance(raised, TimeoutError):
            return StepResult.failed(error, kind=ErrorKind.TIMEOUT, retryable=True)
        if isinstance(raised, ConnectionError):
            return StepResult.failed(error, kind=ErrorKind.SESSION_LOST, retryable=True)
        return StepResult.failed(error)

    def _begin(self) -> int:
        self._stepped = self.record.number
        return self._stepped

    def _take(self, number: int, result: StepResult) -> StepResult:
        with _lock:
            # Results of abandoned steps and finished episodes do not count.
            if number == self.record.number and not self.record.done:
                self.record.add(result)
        return result

    def _refusal(self) -> str | None:
        self._follow_resets()
        last = self.record.last_result
        if last is None or not last.done:
            return None
        why = f" ({last.error})" if last.error else ""
        return f"Error: the episode is over{why}; nothing was executed."

    def _follow_resets(self) -> None:
        number = episode_number(self.env)
        if number != self.record.number:
            with _lock:
                if number != self.record.number:
                    self.record.clear(number)


def _function_of(info: object, env: object) -> dict[str, Any]:
    function: object = None
    if isinstance(info, Mapping):
        function = cast("Mapping[str, Any]", info).get("function")
    if isinstance(function, Mapping):
        fields = dict(cast("Mapping[str, Any]", function))
        if isinstance(fields.get("name"), str) and fields["name"]:
            return fields
    raise ValueError(
        f"tools() of {type(env).__name__} must give definitions with a function name, "
        f"found {info!r}"
    )
