"""How a step fails, whichever executor runs the code: kinds, exit codes, words."""

from __future__ import annotations

from types import TracebackType

from openenv_server.executor import ExecResult, Failure
from openenv_server.memory import is_to_blame
from openenv_server.names import Names
from openenv_server.settings import Settings

__all__ = [
    "exit_code_of",
    "failed_line",
    "is_from_code",
    "memory_failure",
    "timeout_text",
    "too_long",
]


def too_long(code: str, settings: Settings) -> ExecResult | None:
    """Refuse code above the limit, which parsing would blow up a hundredfold in memory."""
    if len(code) <= settings.max_code_chars:
        return None
    return ExecResult(
        stderr=(
            f"the code is {len(code):,} characters long: CODE_MAX_CODE_CHARS allows "
            f"{settings.max_code_chars:,}"
        ),
        exit_code=1,
        failure=Failure.TOO_LONG,
    )


def memory_failure(error: BaseException, names: Names, line: int | None = None) -> ExecResult:
    """Say that there was no memory, and whether that is the code's own doing."""
    where = "" if line is None else f'File "<code>", line {line}\n'
    stdout = str(names.printed)
    if is_to_blame(error, names):
        return ExecResult(
            stdout=stdout,
            stderr=f"{where}MemoryError",
            exit_code=1,
            failure=Failure.EXCEPTION,
        )
    return ExecResult(
        stdout=stdout,
        stderr=(
            "the worker has reached its memory limit (--worker-memory-mb, RLIMIT_DATA), which all "
            "its sessions share: this is no fault of the code as far as can be told. Do not score "
            "the step; raise the limit, or run more workers with fewer sessions each"
        ),
        exit_code=1,
        failure=Failure.WORKER_LIMIT,
    )


def timeout_text(settings: Settings) -> str:
    """Say that a step ran out of time."""
    return f"TimeoutError: the code ran longer than {settings.step_timeout_s:g} s"


def exit_code_of(error: BaseException) -> int:
    """Give the exit code CPython would end with."""
    if not isinstance(error, SystemExit):
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def failed_line(trace: TracebackType | None) -> int | None:
    """Find the line of the code that the interpreter was evaluating when it raised."""
    line: int | None = None
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "evaluate_ast":
            node = trace.tb_frame.f_locals.get("expression")
            line = getattr(node, "lineno", line)
        trace = trace.tb_next
    return line


def is_from_code(error: BaseException) -> bool:
    """Tell an exception of the code from a Ctrl-C that hit the server in the middle of it."""
    if not isinstance(error, KeyboardInterrupt):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "evaluate_raise"
