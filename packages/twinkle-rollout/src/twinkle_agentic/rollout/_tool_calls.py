"""The tool calls of one turn, in order, each answered once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic._aio.bounded import Deadline, TimeLimitError, bounded
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.step_result import StepResult
from twinkle_agentic.protocol._fields import fields_of
from twinkle_agentic.protocol._messages import NOT_EXECUTED
from twinkle_agentic.rollout.types import Failure
from twinkle_agentic.tools._outcome import ToolOutcome, describe_error, refused
from twinkle_agentic.tools.text import to_text
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["StepLog", "Toolbox", "env_tools", "failure_in", "run_calls"]


@dataclass(slots=True)
class StepLog:
    """What the environment gave, step by step.

    Attributes:
        rewards: One per step; 0.0 where it gave none or the step failed.
        missing: Steps whose reward the environment did not give; a number other than 0.0 is one,
            whatever stands beside it.
        failed: Steps that failed; their reward means nothing.
        last: The latest result.
        truncated: Whether a limit of the env ended the episode.
    """

    rewards: list[float] = field(default_factory=list[float])
    missing: list[int] = field(default_factory=list[int])
    failed: list[int] = field(default_factory=list[int])
    last: Any = None
    truncated: bool = False

    def add(self, result: Any) -> str | None:
        """Take in the result of a step; return the kind of error of one that failed."""
        self.last = result
        self.truncated = bool(getattr(result, "truncated", False))
        number = len(self.rewards)
        self.rewards.append(0.0)
        if (failure := failure_in(result)) is not None:
            self.failed.append(number)
            return failure.kind
        info = fields_of(getattr(result, "info", None))
        reward: Any = getattr(result, "reward", None)
        try:
            value = 0.0 if reward is None else float(reward)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            self.failed.append(number)
            return "env"
        if reward is None or (value == 0.0 and info.get("reward_missing")):
            self.missing.append(number)
        self.rewards[number] = value
        return None

    @property
    def lost_episode_failure(self) -> Failure | None:
        """Why the latest result lost the episode; `None` where it did not."""
        return failure_in(self.last) if getattr(self.last, "done", False) else None


class Toolbox:
    """A tool manager, and what the environments behind its tools answered.

    Args:
        manager: A `ToolManager`, or anything that is called with a tool call and has
            `tool_infos()`.
    """

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.steps = StepLog()
        self.errors: Counter[str] = Counter()
        self.env_tools = env_tools(manager)

    @property
    def has_env(self) -> bool:
        """Whether an environment stands behind any of the tools."""
        return bool(self.env_tools)

    @property
    def done(self) -> bool:
        """Whether the environment ended the episode."""
        return any(bool(getattr(tool, "done", False)) for tool in self.env_tools.values())

    async def run(self, call: dict[str, Any], limit_s: float | None) -> str:
        """Run one call and return the text for the model; never raises for a failed call."""
        name: Any = fields_of(call.get("function")).get("name")
        tool = self.env_tools.get(name) if isinstance(name, str) else None
        before = _last_step(tool)
        if isinstance(self.manager, ToolManager):
            outcome = await self.manager.arun(call, timeout_s=limit_s)
        else:
            outcome = await self._run_foreign(call, name, tool, limit_s)
        step = outcome.value if isinstance(outcome.value, StepResult) else None
        if step is None and tool is not None and (after := _last_step(tool))[0] != before[0]:
            step = after[1]  # of a manager or a tool that hands on the text alone
        kind: str | None = outcome.error_kind
        if step is not None and tool is not None:
            kind = self.steps.add(step) or kind
        if kind:
            self.errors[kind] += 1
        return outcome.text

    async def reply(self, message: dict[str, Any], limit_s: float | None) -> str | None:
        """Let the env answer a message without a call; `None` where it has no answer.

        Several envs behind one manager cannot answer together: then there is no answer.
        """
        if len({id(tool.env) for tool in self.env_tools.values()}) != 1:
            return None
        tool = next(iter(self.env_tools.values()))
        if not hasattr(tool, "areply"):
            return None
        try:
            step = await bounded(tool.areply(message), limit_s)
        except TimeLimitError:
            step = tool.abandon(f"no answer within {limit_s or 0:g} s")
        if step is None:
            return None
        if kind := self.steps.add(step):
            self.errors[kind] += 1
        return str(step.observation)

    async def _run_foreign(
        self, call: dict[str, Any], name: object, tool: Any, limit_s: float | None
    ) -> ToolOutcome:
        """Run a call by the manager of another framework, which may bound and contain nothing."""
        acall = getattr(self.manager, "arun", None) or getattr(self.manager, "acall", None)
        work = acall(call) if acall is not None else run_blocking(self.manager, call)
        try:
            result: Any = await bounded(work, limit_s)
        except TimeLimitError:
            abandon = getattr(tool, "abandon", None)
            reason = f"no result within {limit_s or 0:g} s"
            value = None if abandon is None else abandon(reason)
            return refused("timeout", str(name), f"the call gave {reason}", value=value)
        except Exception as error:
            return refused("tool", str(name), f"tool {name!r} raised {describe_error(error)}")
        if hasattr(result, "error_kind"):
            return cast("ToolOutcome", result)
        return ToolOutcome(text=to_text(result))


async def run_calls(
    toolbox: Toolbox,
    calls: Sequence[dict[str, Any]],
    *,
    tool_timeout_s: float | None,
    deadline: Deadline,
) -> list[str]:
    """Run the calls of one turn, one after the other, and return one text for each.

    After the step that ended the episode, and after the deadline, nothing further is run.
    """
    texts: list[str] = []
    for call in calls:
        if toolbox.done:
            texts.append(f"{NOT_EXECUTED}: the episode is over.")
        elif deadline.passed:
            texts.append(f"{NOT_EXECUTED}: the time limit of the episode has passed.")
        else:
            texts.append(await toolbox.run(call, deadline.cap_s(tool_timeout_s)))
    return texts


def _last_step(tool: Any) -> tuple[Any, Any]:
    """Return the number of steps where it is known, else an identity, and the latest result."""
    last = getattr(tool, "last_result", None)
    steps = getattr(getattr(tool, "record", None), "steps", None)
    return (id(last) if steps is None else steps), last


def failure_in(result: Any) -> Failure | None:
    """Return what the result of a reset or a step says went wrong; `None` where nothing did."""
    info = fields_of(getattr(result, "info", None))
    if not info.get("error"):
        return None
    return Failure(
        str(info["error"]), str(info.get("error_kind") or "env"), bool(info.get("retryable"))
    )


def env_tools(manager: Any) -> dict[str, Any]:
    """Return the tools of a manager that have an environment behind them, by name."""
    names: Any = manager.names() if hasattr(manager, "names") else []
    if hasattr(manager, "tools"):
        tools: Any = manager.tools()
        pairs = list(zip(names, tools, strict=False))
    else:  # the manager of another framework
        held: Any = getattr(manager, "_tools", None)
        pairs = list(fields_of(held).items())
    return {
        name: tool
        for name, tool in pairs
        if hasattr(getattr(tool, "env", None), "step") and hasattr(tool, "last_result")
    }
