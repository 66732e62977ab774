"""The tool calls of one turn, in order, each answered once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_agentic._aio.bounded import Deadline, bounded
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.protocol.fields import fields_of
from twinkle_agentic.rollout.history import NOT_EXECUTED
from twinkle_agentic.rollout.types import Failure
from twinkle_agentic.tools.outcome import describe_error
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
    """

    rewards: list[float] = field(default_factory=list[float])
    missing: list[int] = field(default_factory=list[int])
    failed: list[int] = field(default_factory=list[int])
    last: Any = None

    def add(self, result: Any) -> str | None:
        """Take in the result of a step; return the kind of error of one that failed."""
        self.last = result
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
    def loss(self) -> Failure | None:
        """Why the latest result lost the episode; `None` where it did not."""
        return failure_in(self.last) if getattr(self.last, "done", False) else None


class Toolbox:
    """A tool manager, with an eye on the environments behind its tools.

    Args:
        manager: A `ToolManager`, or anything that is called with a tool call and has
            `tool_infos()`.
        own_limits: The manager bounds each call itself.
    """

    def __init__(self, manager: Any, *, own_limits: bool = False) -> None:
        self.manager = manager
        self.own_limits = own_limits
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
        """Run one call and return the text for the model; never raises for a failed call.

        Raises:
            TimeoutError: No result within `limit_s`; the call was given up.
        """
        name: Any = fields_of(call.get("function")).get("name")
        tool = self.env_tools.get(name) if isinstance(name, str) else None
        before = getattr(tool, "last_result", None)
        try:
            work = self._outcome(call)
            # Our manager contains what its tools do; a second task per call would be for nothing.
            contained = limit_s is None and isinstance(self.manager, ToolManager)
            text, kind = await (work if contained else bounded(work, limit_s))
        except TimeoutError:
            abandon = getattr(tool, "abandon", None)
            if abandon is not None:  # the step may go on inside: its env is in an unknown state
                abandon(f"no result within {limit_s or 0:g} s")
            self._count("timeout", tool, before)
            raise
        except Exception as error:
            text = f"Error: tool {name!r} raised {describe_error(error)}"
            kind = "tool"
        self._count(kind, tool, before)
        return text

    async def _outcome(self, call: dict[str, Any]) -> tuple[str, str | None]:
        arun = getattr(self.manager, "arun", None)
        if arun is not None:
            outcome = await arun(call)
            return outcome.text, outcome.error_kind
        acall = getattr(self.manager, "acall", None)
        result = await (acall(call) if acall is not None else run_blocking(self.manager, call))
        return to_text(result), None

    def _count(self, kind: str | None, tool: Any, before: Any) -> None:
        """Note the step, if the call made one, and count the call once if it failed."""
        after = getattr(tool, "last_result", None)
        if after is not None and after is not before:
            kind = self.steps.add(after) or kind
        if kind:
            self.errors[kind] += 1


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
            continue
        if deadline.passed:
            texts.append(f"{NOT_EXECUTED}: the time limit of the episode has passed.")
            continue
        limit_s = deadline.cap_s(None if toolbox.own_limits else tool_timeout_s)
        try:
            texts.append(await toolbox.run(call, limit_s))
        except TimeoutError:
            texts.append(f"Error: the call gave no result within {limit_s or 0:g} s")
    return texts


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
