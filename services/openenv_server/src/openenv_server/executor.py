"""The seam between the environment and what runs the code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

__all__ = ["ExecResult", "Executor", "Failure"]


class Failure(StrEnum):
    """Why a step failed; it stands in the observation's metadata under `failure`."""

    SYNTAX = "syntax"
    """The code does not compile."""
    REFUSED = "refused"
    """The code was not run, or stopped: the executor cannot do what it asks for."""
    EXCEPTION = "exception"
    """The code raised an exception."""
    TIMEOUT = "timeout"
    """The step took longer than `step_timeout_s`."""
    WORKER_LIMIT = "worker_limit"
    """The worker's memory limit was met, and nobody can tell that the code used it up. The
    environment raises it as `memory.WorkerMemoryError`: it is no result of the code."""
    TOO_LONG = "too_long"
    """The code is longer than `max_code_chars`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one piece of code did.

    Attributes:
        stdout: What it printed, also when it failed afterwards.
        stderr: Why it failed; empty when it did not.
        exit_code: 0 when it ran to its end; else what `SystemExit` asked for, or 1.
        failure: Kind of failure; None exactly when `exit_code` is 0.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    failure: Failure | None = None


class Executor(Protocol):
    """Runs code for one session. Names defined by one `run` are there in the next.

    Used by one thread at a time.
    """

    @property
    def name(self) -> str:
        """What this is, for the observation's metadata."""
        ...

    def run(self, code: str) -> ExecResult:
        """Run `code` to its end; its failure is a result, never an exception."""
        ...

    def close(self) -> None:
        """Give back what it holds. May be called twice."""
        ...
