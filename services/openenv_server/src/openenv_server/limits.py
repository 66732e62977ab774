"""What one session may use, and what its code finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from twinkle_isolation import Limits, SandboxSpec

__all__ = ["Failure", "SessionLimits"]

_ONE_THREAD: dict[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


class Failure(StrEnum):
    """Why a step failed; it stands in the observation's metadata under `failure`."""

    SYNTAX = "syntax"
    """The code does not compile."""
    EXCEPTION = "exception"
    """The code raised an exception, or ended with `SystemExit` and a code other than 0."""
    TIMEOUT = "timeout"
    """The step took longer than its limit of wall time."""
    CPU = "cpu"
    """The step used more processor time than its limit."""
    MEMORY = "memory"
    """The session met its memory limit."""
    PROCESSES = "processes"
    """The session has as many processes and threads as it may."""
    DISK = "disk"
    """The files of the session take all the space they may."""
    OPEN_FILES = "open_files"
    """A process has as many files open as it may."""
    OUTPUT = "output"
    """The step printed more than is read of one step."""
    CRASH = "crash"
    """The interpreter ended: `os._exit`, a signal, a fault in native code."""
    TOO_LONG = "too_long"
    """The code is longer than the server takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """The limits of one session, and how its interpreter is made.

    Enforced by: `max_code_chars` and `max_output_chars`, this server (`session.py`); wall time,
    processor time, `interrupt_grace_s` and `max_output_mb`, `twinkle_isolation.python`; memory,
    processes, disk and open files, the kernel for each process and the sandbox's guard for the sum.

    Attributes:
        step_timeout_s: Wall time of a step, in seconds.
        step_cpu_s: Processor time of a step over all processes of the session, in seconds.
        interrupt_grace_s: Seconds a step has to end after it was interrupted; then it is killed.
        memory_mb: Private memory of the session in MiB: of each process, and of all together.
        processes: Processes and threads at once.
        disk_mb: Files, in MiB. They are kept in memory.
        open_files: Open files of each process.
        max_output_chars: Characters kept of stdout and of stderr, each: head and tail.
        max_output_mb: Output of a step in MiB; a step that prints more is ended.
        max_code_chars: A longer piece of code is a failed step.
        packages: Names of installed distributions that the code may import, with what they need.
        preload: Modules imported once, before any session, which share their memory.
        isolation: `bubblewrap`: namespaces, or the server does not start. `process`: directories
            and limits only; the code has the user (for root: another one) and the network of the
            server.
        network: Give the code the network of the server.
        spares: Sessions kept ready.
    """

    step_timeout_s: float = 30.0
    step_cpu_s: float = 60.0
    interrupt_grace_s: float = 1.0
    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 64
    open_files: int = 256
    max_output_chars: int = 1_000_000
    max_output_mb: int = 64
    max_code_chars: int = 4_000_000
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    isolation: Literal["bubblewrap", "process"] = "bubblewrap"
    network: bool = False
    spares: int = 4

    def sandbox(self) -> SandboxSpec:
        """Return what a sandbox of a session is like."""
        return SandboxSpec(
            env=dict(_ONE_THREAD),  # a pool of threads per session would be most of its processes
            network=self.network,
            limits=Limits(
                memory_bytes=self.memory_mb << 20,
                processes=self.processes,
                disk_bytes=self.disk_mb << 20,
                open_files=self.open_files,
            ),
        )

    def explain(self, failure: Failure, *, timeout_s: float) -> str:
        """Say which limit a failed step met; empty where no limit was."""
        return {
            Failure.TIMEOUT: f"the step ran longer than {timeout_s:g} s",
            Failure.CPU: f"the step used more than {self.step_cpu_s:g} s of processor time",
            Failure.MEMORY: f"the session may use {self.memory_mb} MiB of memory",
            Failure.PROCESSES: f"the session may have {self.processes} processes and threads",
            Failure.DISK: f"the files of the session may take {self.disk_mb} MiB",
            Failure.OPEN_FILES: f"a process may have {self.open_files} files open",
            Failure.OUTPUT: f"a step may print {self.max_output_mb} MiB",
        }.get(failure, "")
