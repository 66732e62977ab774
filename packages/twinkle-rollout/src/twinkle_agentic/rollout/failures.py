"""What becomes of trajectories that fail, and how much of what was asked for came back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic.envs.errors import ErrorKind
from twinkle_agentic.protocol.errors import ApiErrorKind
from twinkle_agentic.rollout.types import FinishedTrajectory, StopReason

__all__ = ["Coverage", "FailureAction", "FailurePolicy", "RolloutFailedError", "RolloutResult"]

FailureAction = Literal["keep", "retry", "drop_group", "fail"]
"""`keep` the trajectory (without a reward); `retry` it, even where its failure is not marked
`retryable`, and keep it after the last attempt; `drop_group`: leave its whole group out of the
result; `fail`: end the rollout with `RolloutFailedError`."""

_OWN_KINDS = ("client", "content_filter", "empty_reply", "internal", "template")
_KINDS = {*ApiErrorKind, *ErrorKind, *_OWN_KINDS, "unparsed_tool_call"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """What becomes of trajectories that fail, decided after their last attempt.

    Example:
        >>> FailurePolicy(by_kind={"timeout": "retry", "internal": "fail"}, min_group=2)
        FailurePolicy(default='keep', by_kind={'timeout': 'retry', 'internal': 'fail'}, min_group=2)

    Attributes:
        default: For trajectories that an infrastructure failure left without a reward.
        by_kind: By `error_kind`, before `default`, and also for errors that leave a reward (such as
            `unparsed_tool_call`).
        min_group: Groups with fewer scored trajectories are left out of the result.

    Raises:
        ValueError: An action or an error kind that does not exist, or `min_group` below 1.
    """

    default: FailureAction = "keep"
    by_kind: Mapping[str, FailureAction] = field(default_factory=dict[str, FailureAction])
    min_group: int | None = None

    def __post_init__(self) -> None:
        for kind, action in {"default": self.default, **self.by_kind}.items():
            if action not in get_args(FailureAction):
                known = ", ".join(map(repr, get_args(FailureAction)))
                raise ValueError(f"the action for {kind} must be one of {known}, found {action!r}")
        unknown = sorted(set(self.by_kind) - _KINDS)
        if unknown:
            raise ValueError(f"by_kind has {unknown}; the kinds are {', '.join(sorted(_KINDS))}")
        check_count("min_group", self.min_group, allow_none=True)

    @property
    def retries(self) -> bool:
        """Whether any failure is to be tried again."""
        return "retry" in (self.default, *self.by_kind.values())

    @property
    def drops(self) -> bool:
        """Whether a group may be left out, so that it is decided about as a whole."""
        actions = (self.default, *self.by_kind.values())
        return self.min_group is not None or "drop_group" in actions

    def action(self, trajectory: FinishedTrajectory) -> FailureAction | None:
        """Return what becomes of a finished trajectory; `None` where it did not fail."""
        kind = trajectory["error_kind"]
        if kind is not None and kind in self.by_kind:
            return self.by_kind[kind]
        infrastructure = StopReason(trajectory["stop_reason"]).is_infrastructure
        return self.default if infrastructure else None

    def tries_again(self, trajectory: FinishedTrajectory) -> bool:
        """Return whether a trajectory is played again, while it has attempts left."""
        may_pass = trajectory["reward"] is None and trajectory["retryable"]
        return may_pass or self.action(trajectory) == "retry"

    def drops_group(self, group: Iterable[FinishedTrajectory]) -> bool:
        """Return whether a group whose members have all ended is left out of the result."""
        members = list(group)
        scored = sum(one["reward"] is not None for one in members)
        if self.min_group is not None and scored < self.min_group:
            return True
        return any(self.action(one) == "drop_group" for one in members)


@dataclass(slots=True, kw_only=True)
class Coverage:
    """How much of what was asked for came back.

    Attributes:
        asked: Trajectories asked for.
        completed: Those that ended without an infrastructure failure.
        scored: Those that have a reward.
        dropped: Those that were played, and left out of the result with their group.
        cancelled: Those that the caller cancelled.
        failures: Infrastructure failures by `error_kind`.
    """

    asked: int = 0
    completed: int = 0
    scored: int = 0
    dropped: int = 0
    cancelled: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])

    def add(self, trajectory: FinishedTrajectory) -> None:
        """Count a trajectory that has ended."""
        self.scored += trajectory["reward"] is not None
        if StopReason(trajectory["stop_reason"]).is_infrastructure:
            self.failures[str(trajectory["error_kind"])] += 1
        else:
            self.completed += 1

    @property
    def complete(self) -> bool:
        """Whether all that was not cancelled came back without an infrastructure failure."""
        return self.completed + self.cancelled == self.asked and not self.dropped

    def __str__(self) -> str:
        text = f"{self.completed} of {self.asked} trajectories completed, {self.scored} scored"
        if self.failures:
            by_count = sorted(self.failures.items(), key=lambda pair: (-pair[1], pair[0]))
            kinds = ", ".join(f"{count} {kind}" for kind, count in by_count)
            text += f"; failed: {kinds}"
        if self.dropped:
            text += f"; {self.dropped} left out with their group"
        return text + (f"; {self.cancelled} cancelled" if self.cancelled else "")


class RolloutResult(list[Any]):
    """The trajectories of one call, in order: a list with its `coverage`."""

    def __init__(self, trajectories: Iterable[Any], coverage: Coverage) -> None:
        super().__init__(trajectories)
        self.coverage = coverage

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutResult, (list(self), self.coverage)


class RolloutFailedError(RuntimeError):
    """A trajectory failed in a way for which `FailurePolicy` says `fail`.

    Attributes:
        trajectory: The one that failed.
    """

    def __init__(self, trajectory: FinishedTrajectory) -> None:
        kind = trajectory["error_kind"]
        super().__init__(f"a trajectory failed with {kind!r}: {trajectory['error']}")
        self.trajectory = trajectory

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutFailedError, (self.trajectory,)
