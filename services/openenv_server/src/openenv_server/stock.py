"""OpenEnv's interpreter as it is, with limits and honest failures around it."""

from __future__ import annotations

import json
import logging
from types import TracebackType
from typing import Any

from openenv_server.executor import ExecResult, Failure
from openenv_server.lean import PyExecutor
from openenv_server.names import Names, StepTimeoutError
from openenv_server.output import bound_text
from openenv_server.settings import Settings

__all__ = [
    "StockExecutor",
    "exit_code_of",
    "failed_line",
    "is_from_code",
    "timeout_text",
    "too_long",
]

logger = logging.getLogger(__name__)


class StockExecutor(PyExecutor):
    """The interpreter behind OpenEnv's `coding_env`, with its own idea of Python.

    It differs from stock in its failures only: `SystemExit` and `KeyboardInterrupt` fail the step
    instead of ending the session, printed text survives an exception, stderr is the exception and
    not the server's traceback, output and wall time are bounded.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(additional_imports=list(settings.extra_imports))
        self._settings = settings
        self._names = Names(max_output_chars=settings.max_output_chars, counts=True)
        self._executor.state = self._names
        self._executor.timeout_seconds = None  # a thread per step that ends nothing; see `Names`

    @property
    def name(self) -> str:
        """`smolagents`."""
        return "smolagents"

    def run(self, code: str) -> ExecResult:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run one piece of code."""
        refused = too_long(code, self._settings)
        if refused is not None:
            return refused
        limit, timeout_s = self._settings.max_output_chars, self._settings.step_timeout_s
        self._names.start_step(timeout_s)
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


def _stock_text(value: Any) -> str:
    """Give the value of the last statement in the form `coding_env` gives it."""
    try:
        return json.dumps(value)
    except Exception:
        return repr(value)
