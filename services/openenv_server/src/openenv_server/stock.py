"""OpenEnv's interpreter as it is, with limits and honest failures around it."""

from __future__ import annotations

import json
import logging
from types import TracebackType
from typing import Any

from openenv_server.executor import ExecResult, Failure
from openenv_server.interpreter import BASE_IMPORTS, LocalPythonExecutor
from openenv_server.memory import is_to_blame
from openenv_server.names import Names, StepTimeoutError
from openenv_server.output import bound_text
from openenv_server.settings import Settings

__all__ = [
    "StockExecutor",
    "exit_code_of",
    "failed_line",
    "is_from_code",
    "memory_failure",
    "timeout_text",
    "too_long",
]

logger = logging.getLogger(__name__)


class StockExecutor:
    """The interpreter behind OpenEnv's `coding_env`, with its own idea of Python.

    It differs from stock in its failures: `SystemExit` and `KeyboardInterrupt` fail the step
    instead of ending the session, printed text survives an exception, stderr is the exception and
    not the server's traceback, output and wall time are bounded. And it is kept to its session:
    attributes and imports go through `guard.py` and `modules.py`, as with `strict`.

    Args:
        settings: Limits.
        seed: Seed of the session's own `random`.
    """

    def __init__(self, settings: Settings, *, seed: int | None = None) -> None:
        self._settings = settings
        imports = [*BASE_IMPORTS, *settings.extra_imports]
        self._names = Names(
            max_output_chars=settings.max_output_chars, imports=imports, seed=seed, counts=True
        )
        # No timeout of its own: that is a thread per step and ends nothing; see `Names`.
        self._executor: Any = LocalPythonExecutor([], timeout_seconds=None)
        self._executor.authorized_imports = imports
        self._executor.state = self._names
        self._executor.send_tools({"safe_json_dumps": _safe_json_dumps})  # `coding_env` has it

    @property
    def name(self) -> str:
        """`smolagents`."""
        return "smolagents"

    def run(self, code: str) -> ExecResult:
        """Run one piece of code."""
        refused = too_long(code, self._settings)
        if refused is not None:
            return refused
        self._names.start_step(self._settings.step_timeout_s)
        try:
            return self._evaluate(code)
        finally:
            self._names.end_step()

    def _evaluate(self, code: str) -> ExecResult:
        limit = self._settings.max_output_chars
        try:
            value: Any = self._executor(code).output
            shown = "" if value is None else _stock_text(value)  # may run the code's own __repr__
        except BaseException as error:
            if not is_from_code(error):
                raise
            return self._failure(error)
        return ExecResult(
            stdout=bound_text("\n".join(filter(None, (str(self._names.printed), shown))), limit)
        )

    def close(self) -> None:
        """Forget the variables."""
        self._names.clear()

    def _failure(self, error: BaseException) -> ExecResult:
        stdout, limit = str(self._names.printed), self._settings.max_output_chars
        if isinstance(error, MemoryError):
            return memory_failure(error, self._names)
        if isinstance(error.__context__, MemoryError):  # under the interpreter's own words
            return memory_failure(error.__context__, self._names)
        if isinstance(error, StepTimeoutError):
            text, failure = timeout_text(self._settings), Failure.TIMEOUT
        else:
            text, failure = f"{type(error).__name__}: {error}", Failure.EXCEPTION
        code = exit_code_of(error)
        if code == 0:  # SystemExit(0) ends the code, and nothing failed
            return ExecResult(stdout=stdout)
        return ExecResult(
            stdout=stdout, stderr=bound_text(text, limit), exit_code=code, failure=failure
        )


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


def _safe_json_dumps(value: Any) -> str:
    return json.dumps(value, default=repr)


def _stock_text(value: Any) -> str:
    """Give the value of the last statement in the form `coding_env` gives it."""
    try:
        return json.dumps(value)
    except Exception:
        return repr(value)
