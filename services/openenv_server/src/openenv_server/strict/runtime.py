"""What rewritten code calls: builtins and helpers.

`rewrite.py` refers to the helpers as `name@`.
"""

from __future__ import annotations

import builtins
import itertools
import operator
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

from openenv_server.exits import CarriedError, end_program
from openenv_server.guard import del_attribute, get_attribute
from openenv_server.interpreter import BASE_PYTHON_TOOLS, CONTROL_FLOW, InterpreterError
from openenv_server.names import Names, Printed
from openenv_server.strict.binding import make_function
from openenv_server.strict.errors import as_python

__all__ = ["builtin_tools", "helpers"]

_NEW_BUILTINS = (
    "ascii bin bytearray bytes classmethod format frozenset hash hex id object oct "
    "property repr slice staticmethod"
)


def builtin_tools() -> dict[str, Any]:
    """Give the builtins, and nothing that Python does not have under these names."""
    own = [name for name in BASE_PYTHON_TOOLS if hasattr(builtins, name) and name != "print"]
    tools = {name: BASE_PYTHON_TOOLS[name] for name in own}
    tools |= {name: getattr(builtins, name) for name in _NEW_BUILTINS.split()}
    tools |= {"getattr": _getattr, "delattr": del_attribute}
    return tools | {"exit": end_program, "quit": end_program}


def helpers(names: Names) -> dict[str, Any]:
    """Give the helpers of one session, under the names that rewritten code has for them."""
    printed = names.printed

    def print_(*values: object, **options: Any) -> None:
        _print(printed, *values, **options)

    print_.__name__ = print_.__qualname__ = "print"
    tools: dict[str, Any] = {
        "print": print_,
        "super": super,
        "function": make_function,
        "class": _class,
        "special": _special,
        "method": get_attribute,
        "format": format,
        "matmul": _matmul,
        "assertion": _assertion,
        "str": str,
        "repr": repr,
        "ascii": ascii,
        "iter": iter,
        "chain": itertools.chain.from_iterable,
        "list_of": _list_of,
        "tuple_of": _tuple_of,
        "set_of": _set_of,
        "dict_of": _dict_of,
        "spread": _spread,
        "unpack": _unpack,
        "call_method": _call_method,
        "context": _Context,
        "pos": operator.pos,
        "same": _same,
        "handles": _Handles,
        "caught": as_python,
        "raising": _raising,
    }
    return {f"{name}@": value for name, value in tools.items()}


def _is_from_limit(error: BaseException) -> bool:
    """Tell what no part of the code may swallow: what the interpreter or the worker cannot do."""
    return isinstance(as_python(error), InterpreterError) or isinstance(error, MemoryError)


_SPECIAL = ("__name__", "__class__", "__doc__")


class _Handles:
    """The type of an `except`: matches as in CPython, and lets `return` and `break` through."""

    def __init__(self, kind: Any) -> None:
        self._kinds: tuple[Any, ...] = (kind,)
        if isinstance(kind, tuple):
            self._kinds = cast("tuple[Any, ...]", kind)

    def __instancecheck__(self, error: BaseException) -> bool:
        if isinstance(error, CONTROL_FLOW) or _is_from_limit(error):
            return False
        error = as_python(error)
        for kind in self._kinds:
            if not isinstance(kind, type | tuple):
                raise TypeError(
                    "catching classes that do not inherit from BaseException is not allowed"
                )
        return isinstance(error, self._kinds)


class _Context:
    """A context manager as CPython would use it: leaving by `return` is no exception."""

    def __init__(self, real: Any) -> None:
        self._real = real
        kind = cast("Any", type(real))
        if not hasattr(kind, "__enter__") or not hasattr(kind, "__exit__"):
            raise TypeError(
                f"'{kind.__name__}' object does not support the context manager protocol"
            )

    def __enter__(self) -> Any:
        return self._real.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> bool:
        if error is None or isinstance(error, CONTROL_FLOW):
            self._real.__exit__(None, None, None)
            return False
        if _is_from_limit(error):
            return False
        error = as_python(error)
        return bool(self._real.__exit__(type(error), error, trace))


def _getattr(value: Any, name: str, *default: Any) -> Any:
    return _special(value, name) if name in _SPECIAL else get_attribute(value, name, *default)


def _assertion(source: str, *message: Any) -> AssertionError:
    error = AssertionError(*message)
    if not message:
        error.add_note(source)  # for stderr; `str(error)` is empty as in CPython
    return error


def _matmul(left: Any, right: Any) -> Any:
    return left @ right


def _same(value: Any) -> Any:
    return value


def _raising(value: Any) -> Any:
    if isinstance(value, type) and issubclass(value, BaseException):
        value = cast("Any", value)()
    # A MemoryError that code raises by itself may be caught, one of the worker may not.
    if isinstance(value, MemoryError) or (
        isinstance(value, BaseException) and not isinstance(value, Exception)
    ):
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
    if name == "__name__":
        return value.__name__.removesuffix("@")
    return get_attribute(value, name)


def _call_method(value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return get_attribute(value, name)(*args, **kwargs)


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
