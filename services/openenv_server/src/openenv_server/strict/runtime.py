"""What rewritten code calls: builtins and helpers.

`rewrite.py` refers to the helpers as `name@`.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

from openenv_server.interpreter import BASE_PYTHON_TOOLS, CONTROL_FLOW, InterpreterError
from openenv_server.names import Names, Printed
from openenv_server.strict.shims import CarriedError, end_program, make_shims

__all__ = ["as_python", "builtin_tools", "helpers"]

_NEW_BUILTINS = (
    "ascii bin bytearray bytes classmethod delattr format frozenset hash hex id object oct "
    "property repr slice staticmethod"
)


def builtin_tools() -> dict[str, Any]:
    """Give the builtins, and nothing that Python does not have under these names."""
    own = [name for name in BASE_PYTHON_TOOLS if hasattr(builtins, name) and name != "print"]
    tools = {name: BASE_PYTHON_TOOLS[name] for name in own}
    tools |= {name: getattr(builtins, name) for name in _NEW_BUILTINS.split()}
    return tools | {"exit": end_program, "quit": end_program}


def helpers(names: Names, seed: int | None) -> dict[str, Any]:
    """Give the helpers of one session, under the names that rewritten code has for them."""
    tools: dict[str, Any] = {
        "print": functools.partial(_print, names.printed),
        "super": super,
        "function": _function,
        "class": _class,
        "special": _special,
        "getattr": getattr,
        "str": str,
        "repr": repr,
        "ascii": ascii,
        "iter": iter,
        "list_of": _list_of,
        "tuple_of": _tuple_of,
        "set_of": _set_of,
        "dict_of": _dict_of,
        "spread": _spread,
        "unpack": _unpack,
        "call_method": _call_method,
        "handles": _Handles,
        "caught": as_python,
        "raising": _raising,
    }
    tools |= make_shims(names, seed)
    return {f"{name}@": value for name, value in tools.items()}


def as_python(error: BaseException) -> BaseException:
    """Give the exception CPython would have raised where the interpreter raises its own.

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
    for pattern, kind, message in _TRANSLATIONS:
        found = re.match(pattern, text, re.DOTALL)
        if found and not _is_there_in_python(kind, found.group(1)):
            return kind(message.format(*found.groups()))
    return error


def _is_there_in_python(kind: type[Exception], name: str) -> bool:
    """Tell what CPython has and this interpreter does not: no code may mistake that for absence."""
    if kind is NameError:
        return hasattr(builtins, name)
    if kind is ImportError:
        return name.partition(".")[0] in sys.stdlib_module_names
    return False


_TRANSLATIONS: tuple[tuple[str, type[Exception], str], ...] = (
    (r"The variable `(.*)` is not defined", NameError, "name '{0}' is not defined"),
    (r"Forbidden function evaluation: '(.*?)'", NameError, "name '{0}' is not defined"),
    (r"Cannot delete name '(.*?)'", NameError, "name '{0}' is not defined"),
    (r"Object .* has no attribute (\w+)$", AttributeError, "the object has no attribute '{0}'"),
    (r"Cannot (unpack) tuple of wrong size", ValueError, "wrong number of values to unpack"),
    (r"Import of (\S+) is not allowed", ImportError, "{0} cannot be imported here"),
    (r"Import from (\S+) is not allowed", ImportError, "{0} cannot be imported here"),
    (r"Module (\S+) has no attribute (\S+)", ImportError, "cannot import name '{1}' from '{0}'"),
)


class _Handles:
    """The type of an `except`: matches as in CPython, and lets `return` and `break` through."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __instancecheck__(self, error: BaseException) -> bool:
        if isinstance(error, CONTROL_FLOW):
            return False
        error = as_python(error)
        return not isinstance(error, InterpreterError) and isinstance(error, self._kind)


def _raising(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, BaseException):
        value = cast("Any", value)()
    if isinstance(value, BaseException) and not isinstance(value, Exception):
        return CarriedError(value)
    return cast("Any", value)


def _print(
    printed: Printed,
    *values: object,
    sep: str | None = None,
    end: str | None = None,
    file: object = None,
    flush: bool = False,
) -> None:
    if file is not None:
        raise TypeError("print: this interpreter has no other file to print to")
    text = (" " if sep is None else sep).join(map(str, values))
    printed += text + ("\n" if end is None else end)


def _function(
    called: tuple[str, str, str | None], signature: inspect.Signature, raw: Any, *defaults: Any
) -> Any:
    """Put argument binding as in CPython before a function of the interpreter."""
    name, qualified, doc = called
    parameters = signature.parameters.values()
    with_default = [p.name for p in parameters if p.default is not p.empty]
    filled: dict[str, Any] = dict(zip(with_default, defaults, strict=True))
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            filled[parameter.name] = ()
    var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    order = tuple(signature.parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        values = filled | bound
        if var_keyword is not None:
            values.setdefault(var_keyword, {})
        return raw(*[values[parameter] for parameter in order])

    # The interpreter refuses to call a function by a name like `__len__`.
    call.__name__ = f"{name}@" if name.startswith("__") else name
    call.__qualname__ = qualified
    call.__module__ = "__main__"
    call.__doc__ = doc
    return call


def _class(
    called: tuple[str, str, str | None],
    bases: tuple[Any, ...],
    fields: tuple[str, ...],
    names: tuple[str, ...],
    *values: Any,
    **keywords: Any,
) -> type:
    name, qualified, doc = called

    def fill(body: dict[str, Any]) -> None:
        body["__module__"] = "__main__"
        body["__qualname__"] = qualified
        if doc is not None:
            body["__doc__"] = doc
        if fields:
            body["__annotations__"] = dict.fromkeys(fields, object)
        for index, key in enumerate(names):
            body[key] = values[index]

    return types.new_class(name, bases, keywords, fill)


def _special(value: Any, name: str) -> Any:
    if name == "__class__":
        return cast("type[Any]", type(value))
    if name == "__name__" and callable(value):
        return getattr(cast("Any", value), "__qualname__", "").rpartition(".")[2]
    return getattr(value, name)


def _call_method(value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(value, name)(*args, **kwargs)


def _list_of(*items: Any) -> list[Any]:
    return list(items)


def _tuple_of(*items: Any) -> tuple[Any, ...]:
    return items


def _set_of(*items: Any) -> set[Any]:
    return set(items)


def _dict_of(*parts: Mapping[Any, Any]) -> dict[Any, Any]:
    whole: dict[Any, Any] = {}
    for part in parts:
        whole.update({key: part[key] for key in part.keys()})  # noqa: SIM118  # only a mapping has keys()
    return whole


def _spread(values: Iterable[Any], before: int, after: int) -> tuple[Any, ...]:
    items = list(values)
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    end = len(items) - after
    return (*items[:before], items[before:end], *items[end:])


def _unpack(values: Iterable[Any], count: int) -> tuple[Any, ...]:
    iterator = iter(values)
    items = [item for _, item in zip(range(count), iterator, strict=False)]
    if len(items) < count:
        raise ValueError(f"not enough values to unpack (expected {count}, got {len(items)})")
    for _ in iterator:
        raise ValueError(f"too many values to unpack (expected {count})")
    return tuple(items)
