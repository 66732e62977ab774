"""OpenEnv's interpreter as it is, with limits and honest failures around it."""

from __future__ import annotations

import json
from typing import Any

from openenv_server.executor import ExecResult, Failure
from openenv_server.failures import (
    exit_code_of,
    is_from_code,
    memory_failure,
    timeout_text,
    too_long,
)
from openenv_server.interpreter import BASE_IMPORTS, LocalPythonExecutor
from openenv_server.memory import release
from openenv_server.names import Names, StepTimeoutError
from openenv_server.output import bound_text
from openenv_server.settings import Settings

__all__ = ["StockExecutor"]


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
            try:
                return self._failure(error)
            finally:
                release(error)
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


def _safe_json_dumps(value: Any) -> str:
    return json.dumps(value, default=repr)


def _stock_text(value: Any) -> str:
    """Give the value of the last statement in the form `coding_env` gives it."""
    try:
        return json.dumps(value)
    except Exception:
        return repr(value)
