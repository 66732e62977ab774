"""What code may read and change: its own objects, and the public face of the others.

All sessions of a worker share one process, and with it the classes and functions of every module.
The interpreter reads and sets attributes through the functions here.

"Own" is what the code of a session made: classes whose `__module__` is `__main__`, their
instances, and its functions. Nothing outside a session has that mark, and only own objects take it.
"""

from __future__ import annotations

import abc
import collections
import decimal
import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn, cast

from openenv_server.formats import FRAME_NAMES, guarded_format
from openenv_server.interpreter import InterpreterError, install

__all__ = [
    "OWN_MODULE",
    "del_attribute",
    "exact_text",
    "get_attribute",
    "has_attribute",
    "is_own",
    "set_attribute",
]

OWN_MODULE = "__main__"

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE

_DUNDERS = (
    "name doc init str repr new init_subclass post_init setattr delattr eq ne lt le gt ge hash len "
    "iter next reversed getitem setitem delitem contains missing call enter exit bool int float "
    "index abs neg pos add radd sub rsub mul rmul truediv floordiv mod pow and or xor invert "
    "format bytes iadd isub imul"
)
_READABLE = frozenset(f"__{name}__" for name in _DUNDERS.split())
"""Double-underscore names that lead nowhere."""

_FUNCTION_FACTS = frozenset(
    ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__wrapped__")
)

_FRAMES = (
    types.FrameType,
    types.TracebackType,
    types.CodeType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
)

_WATCHED = FRAME_NAMES | {*("format", "format_map", "register", "copy", "strptime")}

# Objects of other modules that a session makes for itself and may set attributes of.
_MADE_BY_CODE = (
    BaseException,
    dict,
    collections.ChainMap,
    collections.UserDict,
    collections.UserList,
    collections.UserString,
    decimal.Context,
    functools.partial,
)
_SHARED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
    *(property, classmethod, staticmethod),
)
_CACHED = type(functools.cache(len))  # what `functools.lru_cache` gives

_REGISTER = abc.ABCMeta.register
_COPY_OF_USER_DICT: Any = cast("Any", collections.UserDict).copy  # calls the library's `copy`


def is_own(value: Any) -> bool:
    """Tell whether the code of a session made `value`, a class, a function or an instance."""
    if isinstance(value, type | types.FunctionType | _CACHED):
        return value.__module__ == OWN_MODULE
    if type(value) is super:
        return is_own(cast("Any", value).__self_class__)
    return type(value).__module__ == OWN_MODULE


def get_attribute(value: Any, name: str, *default: Any) -> Any:
    """Read an attribute as `getattr` does.

    Raises:
        InterpreterError: It leads to the inside of the server or of a module.
    """
    name = _plain(name)
    if name[:1] != "_" and name not in _WATCHED:
        return getattr(value, name, *default)
    if name.startswith("__") and name.endswith("__"):
        if name not in _READABLE:
            raise InterpreterError(f"Forbidden access to dunder attribute: {name}")
        found = getattr(value, name, *default)
        return _guarded_setter(value, found) if name in _SETTERS else found
    if name == "_convert_":  # of an Enum: puts its members into any module
        _refuse("_convert_ of an Enum is not available")
    if name[0] == "_" and not is_own(value):
        _refuse(f"{name!r} of {_called(value)} is private to it")
    if name in FRAME_NAMES and isinstance(value, _FRAMES):
        _refuse(f"{name!r} of {_called(value)} leads out of the code")
    found = getattr(value, name, *default)
    if name in ("format", "format_map"):
        return guarded_format(found, name)
    if name == "strptime":
        return exact_text(found)
    if name == "register":
        return _own_registration(found)
    if name == "copy" and getattr(found, "__func__", found) is _COPY_OF_USER_DICT:
        _refuse("copy() of a UserDict is not possible in this interpreter: make a new one of it")
    return found


def has_attribute(value: Any, name: str) -> bool:
    """Tell whether there is an attribute, as `hasattr` does."""
    return hasattr(value, _plain(name))


def set_attribute(value: Any, name: str, new: Any) -> None:
    """Set an attribute as `setattr` does.

    Raises:
        InterpreterError: The object is not the session's own.
    """
    name = _plain(name)
    _check_change(value, name)
    setattr(value, name, new)


def del_attribute(value: Any, name: str) -> None:
    """Delete an attribute as `delattr` does; raises as `set_attribute`."""
    name = _plain(name)
    _check_change(value, name)
    delattr(value, name)


def _check_change(value: Any, name: str) -> None:
    if isinstance(value, types.FunctionType):
        dunder = name.startswith("__") and name.endswith("__")
        if is_own(value) and (not dunder or name in _FUNCTION_FACTS):
            return
    elif type(value) is super or is_own(value):
        return
    elif isinstance(value, type):
        if value.__flags__ & _IMMUTABLE_TYPE:  # Python refuses by itself, in its own words
            return
    elif isinstance(value, _MADE_BY_CODE) or (
        type(value).__module__ == "builtins" and not isinstance(value, _SHARED)
    ):
        return
    _refuse(
        f"{name!r} of {_called(value)} cannot be changed: other sessions use the same object, so "
        "make a subclass or a copy and change that"
    )


def _guarded_setter(value: Any, found: Any) -> Any:
    """Give `__setattr__` or `__delattr__`, such that it changes own objects only."""
    if isinstance(found, types.FunctionType | types.MethodType):  # the code's own method
        return found
    if isinstance(found, types.WrapperDescriptorType):  # of a class: takes the object

        def set_of(target: Any, name: str, *new: Any) -> None:
            name = _plain(name)
            _check_change(target, name)
            found(target, name, *new)

        return set_of
    bound_to = found.__self__

    def set_here(name: str, *new: Any) -> None:
        name = _plain(name)
        _check_change(bound_to, name)
        found(name, *new)

    return set_here


_SETTERS = ("__setattr__", "__delattr__")


def exact_text(function: Any) -> Any:
    """Pass text on without its class, whose `__eq__` the caches of the library would ask."""

    def call(*args: Any, **kwargs: Any) -> Any:
        plain = [str.__str__(arg) if isinstance(arg, str) else arg for arg in args]
        named = {k: str.__str__(v) if isinstance(v, str) else v for k, v in kwargs.items()}
        return function(*plain, **named)

    call.__name__ = call.__qualname__ = function.__name__
    return call


def _own_registration(found: Any) -> Any:
    """Refuse `register` of an abstract class of everybody."""
    if getattr(found, "__func__", found) is not _REGISTER:
        return found

    def register(cls: Any, kind: Any) -> Any:
        if not is_own(cls):
            _refuse(f"nothing can be registered with {_called(cls)}: other sessions use it too")
        return _REGISTER(cls, kind)

    bound_to = getattr(found, "__self__", None)
    return register if bound_to is None else functools.partial(register, bound_to)


def _plain(name: Any) -> str:
    """Give the text of a name without the methods of a subclass of `str`."""
    if type(name) is str:
        return name
    if not isinstance(name, str):
        raise TypeError(f"attribute name must be string, not '{type(name).__name__}'")
    return str.__str__(name)


def _called(value: Any) -> str:
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__name__!r}"
    return f"a {type(value).__name__!r} object"


def _refuse(text: str) -> NoReturn:
    raise InterpreterError(text)


_attribute: Callable[..., Any] = get_attribute
install(getattr=_attribute, setattr=set_attribute, hasattr=has_attribute)
