"""Modules that code gets in part, and modules that would reach beyond the session."""

from __future__ import annotations

import operator
import queue
import random
import string
import sys
import time
import types
import typing
from collections.abc import Mapping
from typing import Any, NoReturn

from openenv_server.interpreter import InterpreterError
from openenv_server.names import Names

__all__ = ["SHIMS", "CarriedError", "end_program", "make_shims"]

_TYPING = (
    "Any Callable ClassVar Collection Container Counter DefaultDict Deque Dict Final FrozenSet "
    "Generic Hashable Iterable Iterator List Literal Mapping MutableMapping MutableSequence "
    "MutableSet NamedTuple NoReturn Optional OrderedDict Protocol Reversible Self Sequence Set "
    "Sized Tuple Type TypeVar TYPE_CHECKING Union cast overload runtime_checkable"
)

SHIMS = ("operator", "queue", "random", "string", "sys", "time", "typing")
"""Modules that are replaced."""


class CarriedError(Exception):
    """Carries an exception that is no `Exception`, which the interpreter's `try` passes by."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(original)
        self.original = original


class _Shim:
    """Some names of a module; asking for another one fails the step."""

    def __init__(self, module: str, names: Mapping[str, Any]) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by Python itself
            raise AttributeError(name)
        raise InterpreterError(f"{self._module}.{name} is not available")


def make_shims(names: Names, seed: int | None) -> dict[str, Any]:
    """Make the modules of one session.

    Args:
        names: Tells how much time a step has left.
        seed: Of the session's own `random`.
    """
    source = random.Random(seed)  # the module's functions share one state in the whole process

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, max(0.0, names.time_left())))

    public: dict[str, Mapping[str, Any]] = {
        # attrgetter and methodcaller reach the attributes that the interpreter bars.
        "operator": _without(operator, "attrgetter", "methodcaller"),
        "queue": {
            "Queue": _endless(queue.Queue),
            "LifoQueue": _endless(queue.LifoQueue),
            "PriorityQueue": _endless(queue.PriorityQueue),
            "SimpleQueue": _endless(queue.Queue),
            "Empty": queue.Empty,
            "Full": queue.Full,
        },
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
        "time": _without(time) | {"sleep": sleep},
        "typing": {name: getattr(typing, name) for name in _TYPING.split()},
    }
    return {module: _Shim(module, public[module]) for module in SHIMS}


def end_program(code: object = None) -> NoReturn:
    """End the code, as `exit` and `sys.exit` do."""
    raise CarriedError(SystemExit(code))


def _without(module: types.ModuleType, *banned: str) -> dict[str, Any]:
    return {
        name: value for name, value in vars(module).items() if name[0] != "_" and name not in banned
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
