"""What a verdict says."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["CaseResult", "Reason", "TaskFaultError", "Verdict"]


class TaskFaultError(ValueError):
    """Tests that tell no right solution from a wrong one.

    Attributes:
        line: Of the tests; `None` where it is none in particular.
    """

    def __init__(self, text: str, *, line: int | None = None) -> None:
        super().__init__(text if line is None else f"line {line} of the tests: {text}")
        self.line = line


class Reason(StrEnum):
    """Why a solution has not passed."""

    FAILED = "failed"
    """A test failed."""
    ERROR = "error"
    """A test ended with another exception than a failed assertion."""
    SOLUTION = "solution"
    """The solution itself raised, before any test."""
    MISSING_NAME = "missing_name"
    """The solution does not define what the tests call."""
    EXITED = "exited"
    """The interpreter ended before the tests did: `os._exit`, a crash, a kill."""
    LIMIT = "limit"
    """Time, memory or another limit of the run was met."""
    REFUSED = "refused"
    """The solution did what only reaches for the tests, or returned what compares as it likes."""
    NOTHING_CHECKED = "nothing_checked"
    """The tests ended, but no assertion of theirs was reached."""
    TASK = "task"
    """The tests are at fault: there is no score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One test.

    Attributes:
        name: Of the function or method; `line N` for an assertion outside of functions.
        outcome: `passed`, `failed` (an assertion) or `error` (any other exception).
        text: The exception, with the line where it was raised; empty where it passed.
    """

    name: str
    outcome: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a solution's tests.

    Attributes:
        passed: All tests ran to their end and passed, and something was checked.
        reason: Why it has not passed; `None` where it has.
        text: One line for the model: what failed, where.
        cases: Every test that ran.
        task_fault: The tests are at fault, so that the solution has no score.
    """

    passed: bool
    reason: Reason | None = None
    text: str = ""
    cases: tuple[CaseResult, ...] = field(default=())
    task_fault: bool = False

    @property
    def fraction(self) -> float:
        """The part of the tests that passed, from 0 to 1; 0 where a reason voids them all."""
        if self.passed:
            return 1.0
        if self.reason not in (Reason.FAILED, Reason.ERROR) or not self.cases:
            return 0.0
        # A test that could not run for an earlier error is none of `cases`: never all.
        passed = sum(case.outcome == "passed" for case in self.cases)
        return passed / max(len(self.cases), passed + 1)

    def counts(self) -> dict[str, list[str]]:
        """Return the names of the tests by outcome: `passed`, `failed`, `errors`."""
        keys = {"passed": "passed", "failed": "failed", "error": "errors"}
        return {
            key: [case.name for case in self.cases if case.outcome == outcome]
            for outcome, key in keys.items()
        }
