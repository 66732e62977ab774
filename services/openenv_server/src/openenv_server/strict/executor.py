"""The stock interpreter, held to Python: right or refused."""

from __future__ import annotations

import ast
import threading
import warnings
from typing import Any

from openenv_server.executor import ExecResult, Failure
from openenv_server.failures import (
    exit_code_of,
    failed_line,
    is_from_code,
    memory_failure,
    timeout_text,
    too_long,
)
from openenv_server.interpreter import BASE_IMPORTS, InterpreterError, evaluate_ast
from openenv_server.memory import release
from openenv_server.names import StepTimeoutError
from openenv_server.output import bound_text
from openenv_server.settings import Settings
from openenv_server.strict.errors import as_python, is_import_not_offered
from openenv_server.strict.nodes import RefusedError
from openenv_server.strict.rewrite import prepare
from openenv_server.strict.runtime import builtin_tools, helpers
from openenv_server.strict.variables import Variables

__all__ = ["StrictExecutor"]

_warnings_lock = threading.Lock()
_IN_PART = ("operator", "string", "sys", "typing")  # see library.py


class StrictExecutor:
    """Runs code in OpenEnv's interpreter such that it does what CPython does, or fails.

    So far as that has been compared; see `tests/programs`.

    The code is rewritten before it is run (`rewrite.py`); what the interpreter would get silently
    wrong after that is refused. When the last statement is an expression its `repr` is printed, as
    at Python's prompt. Not a boundary for hostile code: everything happens in this process; what
    sessions are kept from is in `guard.py` and `modules.py`.

    Args:
        settings: Limits.
        seed: Seed of the session's own `random`.
    """

    def __init__(self, settings: Settings, *, seed: int | None = None) -> None:
        self._settings = settings
        self._imports = [*BASE_IMPORTS, *settings.extra_imports, *_IN_PART]
        self._names = Variables(
            max_output_chars=settings.max_output_chars, imports=self._imports, seed=seed
        )
        self._tools = builtin_tools() | helpers(self._names)
        # Callable because they are here, under keys no code can write; found by name because they
        # are there: the interpreter lets a variable hide the second kind only.
        self._allowed = {f"{name}@allowed": tool for name, tool in self._tools.items()}
        self._count = 0

    @property
    def name(self) -> str:
        """`smolagents-strict`."""
        return "smolagents-strict"

    def run(self, code: str) -> ExecResult:
        """Run one piece of code."""
        refused = too_long(code, self._settings)
        if refused is not None:
            return refused
        try:
            tree = _parse(code)
            shows_value = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
            tree, self._count = prepare(tree, first=self._count)
        except RefusedError as error:
            return self._failed(f"line {error.line}: {error}", Failure.REFUSED)
        except (SyntaxError, ValueError) as error:
            return self._failed(_syntax_text(error), Failure.SYNTAX)
        except (RecursionError, MemoryError) as error:
            return self._failed(
                f"{type(error).__name__}: the code is nested too deeply", Failure.SYNTAX
            )
        self._names.start_step(self._settings.step_timeout_s)
        try:
            return self._evaluate(tree.body, shows_value=shows_value)
        finally:
            self._names.end_step()

    def close(self) -> None:
        """Forget the variables."""
        self._names.clear()

    def _evaluate(self, body: list[ast.stmt], *, shows_value: bool) -> ExecResult:
        value: Any = None
        try:
            for statement in body:
                value = evaluate_ast(
                    statement,
                    self._names,
                    self._allowed,
                    self._tools,
                    self._imports,
                )
            if shows_value and value is not None:
                text = repr(value)  # may run the code's own __repr__
                printed = self._names.printed
                printed += f"{text}\n"
        except BaseException as error:
            if not is_from_code(error):
                raise
            try:
                return self._raised(error)
            finally:
                release(error)
        return ExecResult(stdout=str(self._names.printed))

    def _raised(self, error: BaseException) -> ExecResult:
        stdout = str(self._names.printed)
        line = failed_line(error.__traceback__)
        if isinstance(error, MemoryError):
            return memory_failure(error, self._names, line)
        not_offered = is_import_not_offered(error)
        error = as_python(error)
        code = exit_code_of(error)
        if code == 0:  # SystemExit(0) ends the code, and nothing failed
            return ExecResult(stdout=stdout)
        where = "" if line is None else f'File "<code>", line {line}\n'
        if isinstance(error, StepTimeoutError):
            return self._failed(where + timeout_text(self._settings), Failure.TIMEOUT, stdout)
        if isinstance(error, InterpreterError):
            return self._failed(
                f"{where}not possible in this interpreter: {error}", Failure.REFUSED, stdout
            )
        text = f"{where}{type(error).__name__}"
        said = _message(error)
        notes: list[str] = getattr(error, "__notes__", [])
        if said or notes:
            text += f": {said or notes[0]}"
        failure = Failure.REFUSED if not_offered else Failure.EXCEPTION
        return self._failed(text, failure, stdout, exit_code=code)

    def _failed(
        self, stderr: str, failure: Failure, stdout: str = "", *, exit_code: int = 1
    ) -> ExecResult:
        stderr = bound_text(stderr, self._settings.max_output_chars)
        return ExecResult(stdout=stdout, stderr=stderr, exit_code=exit_code, failure=failure)


def _parse(code: str) -> ast.Module:
    with _warnings_lock, warnings.catch_warnings():  # the filters are the whole process's
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(code, "<code>")
        compile(tree, "<code>", "exec", dont_inherit=True)  # finds `return` outside a function
    return tree


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # the code's own __str__
        return f"<str() of the exception raised {type(failed).__name__}>"


def _syntax_text(error: SyntaxError | ValueError) -> str:
    if not isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"  # a null byte
    lines = [f'File "<code>", line {error.lineno}']
    if error.text:
        lines += [error.text.rstrip("\n"), " " * ((error.offset or 1) - 1) + "^"]
    return "\n".join([*lines, f"{type(error).__name__}: {error.msg}"])
