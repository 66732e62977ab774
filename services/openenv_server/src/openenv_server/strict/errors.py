"""Gives the exceptions of CPython where the interpreter raises its own."""

from __future__ import annotations

import builtins
import re
import sys
from types import TracebackType
from typing import Any

from openenv_server.exits import CarriedError
from openenv_server.interpreter import InterpreterError
from openenv_server.strict.variables import Variables, unbound

__all__ = ["as_python", "is_import_not_offered"]


def as_python(error: BaseException) -> BaseException:
    """Give the exception CPython would have raised.

    An `InterpreterError` in the result is a thing the interpreter cannot do.
    """
    if isinstance(error, CarriedError):
        return error.original
    if not isinstance(error, InterpreterError):
        return error
    if isinstance(error.__cause__, KeyError | IndexError | TypeError):
        return error.__cause__
    text = str(error)
    if text.startswith("Cannot delete index/key") and error.__context__ is not None:
        return error.__context__
    seen = _locals_at_raise(error.__traceback__)
    if text.startswith("Object ") and "has no attribute" in text and "func_name" in seen:
        return _attribute_error(seen["obj"], seen["func_name"])
    if text == "Cannot unpack tuple of wrong size" and "target" in seen:
        return _unpack_error(len(seen["target"].elts), len(seen["value"]))
    missing = _MISSING_NAME.match(text)
    if missing:
        return _name_error(missing.group(1) or missing.group(2), seen.get("state")) or error
    for pattern, kind, message in _TRANSLATIONS:
        found = re.match(pattern, text, re.DOTALL)
        if found and not _is_there_in_python(kind, found.group(1)):
            return kind(message.format(*found.groups()))
    return error


def is_import_not_offered(error: BaseException) -> bool:
    """Tell whether code ended with the import of a module that it may not have here.

    Another machine may well have it, so that is no fault of the code.
    """
    return isinstance(error, InterpreterError) and str(error).startswith("Import ")


def _locals_at_raise(trace: TracebackType | None) -> dict[str, Any]:
    """Give the interpreter's own variables where it raised."""
    if trace is None:
        return {}
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_locals


def _name_error(name: str, scope: object) -> NameError | None:
    if isinstance(scope, Variables) and scope.is_unset(name):
        return unbound(name)
    if hasattr(builtins, name):  # CPython has it: no code may mistake that for absence
        return None
    return NameError(f"name {name!r} is not defined", name=name)


def _attribute_error(value: Any, name: str) -> BaseException:
    try:
        getattr(value, name)
    except AttributeError as error:
        return error
    return AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")


def _unpack_error(expected: int, found: int) -> ValueError:
    if found > expected:
        return ValueError(f"too many values to unpack (expected {expected})")
    return ValueError(f"not enough values to unpack (expected {expected}, got {found})")


def _is_there_in_python(kind: type[Exception], name: str) -> bool:
    """Tell what CPython has and this interpreter does not: no code may mistake that for absence."""
    return kind is ImportError and name.partition(".")[0] in sys.stdlib_module_names


_MISSING_NAME = re.compile(
    r"The variable `(.*)` is not defined|Forbidden function evaluation: '(.*?)'"
)

_TRANSLATIONS: tuple[tuple[str, type[Exception], str], ...] = (
    (r"Cannot delete name '(.*?)'", NameError, "name '{0}' is not defined"),
    (r"Import of (\S+) is not allowed", ImportError, "{0} cannot be imported here"),
    (r"Import from (\S+) is not allowed", ImportError, "{0} cannot be imported here"),
    (r"Module (\S+) has no attribute (\S+)", ImportError, "cannot import name '{1}' from '{0}'"),
)
