"""Modules of the library that reach beyond a session, in the form in which a session gets them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
import queue
import random
import re
import string
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

from openenv_server.exits import end_program
from openenv_server.guard import OWN_MODULE, exact_text, is_own, set_attribute
from openenv_server.interpreter import InterpreterError, second_instance

__all__ = ["changed_names", "parts_of_modules"]

_TYPING = (
    "Any Callable ClassVar Collection Container Counter DefaultDict Deque Dict Final FrozenSet "
    "Generic Hashable Iterable Iterator List Literal Mapping MutableMapping MutableSequence "
    "MutableSet NamedTuple NoReturn Optional OrderedDict Protocol Reversible Self Sequence Set "
    "Sized Tuple Type TypeVar TYPE_CHECKING Union cast"
)
_RE = "compile search match fullmatch split findall finditer sub subn"
_TIME = (
    "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time "
    "process_time_ns thread_time thread_time_ns strftime strptime gmtime localtime mktime ctime "
    "asctime struct_time timezone altzone daylight tzname get_clock_info"
)

# The copies and dataclasses of everybody set attributes for whoever calls them.
_copy = second_instance("copy")
_dataclasses = second_instance("dataclasses")
_copy.setattr = set_attribute
_dataclasses.setattr = set_attribute
_dataclasses.copy = _copy
_COPY: dict[str, Any] = {name: getattr(_copy, name) for name in _copy.__all__}


def parts_of_modules(seed: int | None, time_left: Callable[[], float]) -> dict[str, dict[str, Any]]:
    """Give the modules of which a session has some names only.

    Args:
        seed: Of the session's own `random`.
        time_left: Tells how many seconds the step may still take; `time.sleep` takes no longer.
    """
    source = random.Random(seed)  # the module's functions share one state in the whole process

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, max(0.0, time_left())))

    return {
        # attrgetter and methodcaller reach the attributes that the interpreter bars.
        "operator": {
            name: value
            for name, value in vars(operator).items()
            if name[0] != "_" and name not in ("attrgetter", "methodcaller")
        },
        "queue": dict(_QUEUE),
        "random": {name: getattr(source, name) for name in dir(source) if name[0] != "_"}
        | {"Random": random.Random},
        "string": {n: v for n, v in vars(string).items() if isinstance(v, str) and n[0] != "_"}
        | {"capwords": string.capwords},
        "sys": {
            "maxsize": sys.maxsize,
            "float_info": sys.float_info,
            "version_info": sys.version_info,
            "exit": end_program,
        },
        "time": {name: getattr(time, name) for name in _TIME.split()}
        | {"sleep": sleep, "strptime": exact_text(time.strptime)},
        "typing": {name: getattr(typing, name) for name in _TYPING.split()}
        | {"overload": _overload, "runtime_checkable": _runtime_checkable},
    }


def changed_names() -> Mapping[str, Mapping[str, Any]]:
    """Give the functions of the library that change what they are given, for own objects only."""
    return _CHANGED


def _overload(function: Any) -> Any:
    """Do without the table of overloads, which the whole process has."""

    def overloaded(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("an overloaded function needs one without @overload after it")

    return overloaded


def _runtime_checkable(kind: Any) -> Any:
    _check_own(kind)
    return typing.runtime_checkable(kind)


def _total_ordering(kind: Any) -> Any:
    _check_own(kind)
    return functools.total_ordering(kind)


def _update_wrapper(
    wrapper: Any,
    wrapped: Any,
    assigned: Iterable[str] = functools.WRAPPER_ASSIGNMENTS,
    updated: Iterable[str] = functools.WRAPPER_UPDATES,
) -> Any:
    names, parts = tuple(assigned), tuple(updated)
    if set(names) - set(functools.WRAPPER_ASSIGNMENTS) or set(parts) - {"__dict__"}:
        raise InterpreterError("update_wrapper: other names than the usual are not available")
    if not all(type(name) is str for name in (*names, *parts)):
        raise TypeError("update_wrapper: names must be str")
    _check_own(wrapper)
    return functools.update_wrapper(wrapper, wrapped, names, parts)


def _wraps(
    wrapped: Any,
    assigned: Iterable[str] = functools.WRAPPER_ASSIGNMENTS,
    updated: Iterable[str] = functools.WRAPPER_UPDATES,
) -> Any:
    def wrap(wrapper: Any) -> Any:
        return _update_wrapper(wrapper, wrapped, assigned, updated)

    return wrap


def _dataclass(kind: Any = None, /, **options: Any) -> Any:
    def make(kind: Any) -> Any:
        _check_fields(kind)
        return _dataclasses.dataclass(kind, **options)

    return make if kind is None else make(kind)


def _make_dataclass(
    cls_name: str, fields: Iterable[Any], *, namespace: Mapping[str, Any] | None = None, **rest: Any
) -> Any:
    specs = [spec if isinstance(spec, str) else tuple(spec) for spec in fields]
    for spec in specs:
        _check_name(spec if isinstance(spec, str) else spec[0] if spec else spec)
    body = {"__module__": OWN_MODULE, **(namespace or {})}
    if "__annotations__" in body:
        raise InterpreterError("make_dataclass: give the fields, not annotations")
    if sys.version_info >= (3, 12):  # would put the module of its caller over that of `body`
        rest["module"] = body["__module__"]
    return _dataclasses.make_dataclass(cls_name, specs, namespace=body, **rest)


def _check_fields(kind: Any) -> None:
    """See that names of fields are names: `dataclasses` makes code of them and runs it."""
    _check_own(kind)
    if not isinstance(kind, type):
        raise TypeError(f"dataclass() takes a class, not a {type(kind).__name__!r} object")
    if is_own(type(kind)):
        raise InterpreterError("a dataclass with a metaclass of its own is not possible")
    for base in type.mro(kind):
        inside = cast("Mapping[str, Any]", type.__dict__["__dict__"].__get__(base))  # type: ignore[index]
        annotations: Any = inside.get("__annotations__", {})
        fields: Any = inside.get("__dataclass_fields__", {})
        if type(annotations) is not dict or type(fields) is not dict:
            raise TypeError("the fields of a dataclass must be in a dict")
        for name in cast("dict[Any, Any]", annotations):
            _check_name(name)
        for name, field in cast("dict[Any, Any]", fields).items():
            _check_name(name)
            if type(field) is not _dataclasses.Field or field.name != name:
                raise InterpreterError(f"the field {name!r} was not made by dataclass()")


def _check_name(name: Any) -> None:
    if type(name) is not str or not name.isidentifier():
        raise TypeError(f"field names must be valid identifiers: {name!r}")


def _check_own(value: Any) -> None:
    if not is_own(value):
        called = getattr(value, "__name__", type(value).__name__)
        raise InterpreterError(
            f"{called!r} cannot be changed: other sessions use the same object, so make a subclass"
        )


def _abstract(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        if isinstance(function, types.FunctionType):
            _check_own(function)
        return make(function)

    return mark


def _unavailable(module: str, name: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise InterpreterError(f"{module}.{name} is not available: it changes a whole module")

    return call


_CHANGED: dict[str, dict[str, Any]] = {
    "abc": {
        name: _abstract(getattr(abc, name))
        for name in ("abstractmethod", "abstractclassmethod", "abstractstaticmethod")
    },
    "copy": _COPY,
    "dataclasses": {name: getattr(_dataclasses, name) for name in dataclasses.__all__}
    | {"dataclass": _dataclass, "make_dataclass": _make_dataclass},
    "enum": {
        name: _unavailable("enum", name)
        for name in ("global_enum", "global_enum_repr", "global_flag_repr", "global_str")
    },
    "functools": {
        "total_ordering": _total_ordering,
        "update_wrapper": _update_wrapper,
        "wraps": _wraps,
    },
    "re": {name: exact_text(getattr(re, name)) for name in _RE.split()},
}


def _endless(base: type[queue.Queue[Any]]) -> type[queue.Queue[Any]]:
    """Make a queue that does not wait: nobody else could put or take anything."""

    class LonelyQueue(base):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if block and timeout is None and self.empty():
                raise InterpreterError("get() on an empty queue would wait for ever")
            return super().get(block=False)

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if block and timeout is None and self.full():
                raise InterpreterError("put() on a full queue would wait for ever")
            super().put(item, block=False)

        def join(self) -> None:
            if self.unfinished_tasks:
                raise InterpreterError("join() on a queue with open tasks would wait for ever")

    LonelyQueue.__name__ = LonelyQueue.__qualname__ = base.__name__
    LonelyQueue.__module__ = "queue"
    return LonelyQueue


_QUEUE: dict[str, Any] = {
    "Queue": _endless(queue.Queue),
    "LifoQueue": _endless(queue.LifoQueue),
    "PriorityQueue": _endless(queue.PriorityQueue),
    "SimpleQueue": _endless(queue.Queue),
    "Empty": queue.Empty,
    "Full": queue.Full,
}
