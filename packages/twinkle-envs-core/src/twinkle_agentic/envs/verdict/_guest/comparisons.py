"""Comparisons that prove something: not those that the solution's own class decides."""

# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false
# Values of any kind pass through here.
from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

__all__ = ["ComparisonCheck"]

_MRO: Any = type.__dict__["__mro__"]
_DICT: Any = type.__dict__["__dict__"]
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MOST = 100_000  # values looked at in one comparison
_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda left, right: left in right,
    "NotIn": lambda left, right: left not in right,
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "MatMult": operator.matmul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "BitAnd": operator.and_,
}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")
_ARITHMETIC = tuple(
    f"__{side}{name}__"
    for name in [
        "add",
        "sub",
        "mul",
        "matmul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "lshift",
        "rshift",
        "or",
        "xor",
        "and",
    ]
    for side in ("", "r", "i")
)


class ComparisonCheck:
    """Tells whether a comparison proves something.

    A class that existed before the solution ran is trusted, and so is one that takes its
    comparison from such a class.

    Args:
        report: Called with what proves nothing.
        trusted: The ids of classes.
    """

    def __init__(self, report: Callable[[str], None], trusted: set[int]) -> None:
        self.report = report
        self.trusted = trusted

    def definer(self, value: Any, names: Iterable[str] = _COMPARISONS) -> type | None:
        """Return the class of the solution that decides how a value compares."""
        cls = type(value)
        if id(cls) in self.trusted:
            return None
        for base in _MRO.__get__(cls):
            if id(base) in self.trusted or not base.__flags__ & _HEAP:
                continue
            own = _DICT.__get__(base)
            if any(name in own for name in names):
                return base
        return None

    def definers(self, value: Any) -> set[type]:
        """Return the classes that decide how a value, or one of those in it, compares."""
        found: set[type] = set()
        seen: set[int] = set()
        left = [value]
        while left and len(seen) < _MOST:
            one = left.pop()
            if id(one) in seen or type(one) in (int, str, float, bool, bytes, type(None)):
                continue
            seen.add(id(one))
            if (cls := self.definer(one)) is not None:
                found.add(cls)
            if isinstance(one, dict):
                left.extend(dict.keys(one))
                left.extend(dict.values(one))
            elif isinstance(one, list | tuple | set | frozenset | deque):
                left.extend(_all(one))
        return found

    def compare(self, names: str, *values: Any) -> Any:
        """Compare as the operators of these names do."""
        result: Any = True
        left = values[0]
        for name, right in zip(names.split(), values[1:], strict=True):
            decides = name not in ("Is", "IsNot")
            if decides:  # before, for it may change its class, and after, for it may get one
                self.check(left, right)
            result = _OPS[name](left, right)
            if decides:
                self.check(left, right)
            if len(values) > 2 and not result:
                return result
            left = right
        return result

    def check(self, left: Any, right: Any) -> None:
        """Report a comparison between a plain value and one that decides for itself."""
        ours, theirs = self.definers(left), self.definers(right)
        for cls in ours ^ theirs:
            self.report(f"a value of the solution's class {_name(cls)} decides how it compares")

    def combine(self, name: str, left: Any, right: Any) -> Any:
        """Compute as the operator of this name does: a difference is half a comparison."""
        sides = {self.definer(left, _ARITHMETIC), self.definer(right, _ARITHMETIC)}
        result = _OPS[name](left, right)
        plain = self.definer(result, _ARITHMETIC) is None
        if len(sides) == 2 and None in sides and (plain or name == "Sub"):
            (cls,) = sides - {None}
            self.report(f"a value of the solution's class {_name(cls)} decides what it gives")
        return result

    def differ(self, left: Any, right: Any) -> None:
        """Report a difference that the solution's class decides."""
        for cls in {self.definer(left, _ARITHMETIC)} ^ {self.definer(right, _ARITHMETIC)}:
            if cls is not None:
                self.report(f"a value of the solution's class {_name(cls)} decides what it gives")

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that compares its arguments."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        plain = isinstance(owner, str | list | tuple | set | frozenset | dict)
        values = [owner, *args] if plain or name in _COMPARISONS else list(args)
        values += [kwargs[key] for key in ("first", "second", "a", "b") if key in kwargs]
        for left, right in pairwise(values):
            self.check(left, right)
            if "lmost" in name or "close" in name:  # they look at a difference
                self.differ(left, right)
        result = function(*args, **kwargs)
        for left, right in pairwise(values):
            self.check(left, right)
        return result


def _all(values: Any) -> list[Any]:
    """Return what is in a container whose class may hide it."""
    kinds: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
    for kind in kinds:
        if isinstance(values, kind):
            return list(kind.__iter__(values))
    return []


def _name(cls: Any) -> str:
    name = type.__dict__["__name__"].__get__(cls)
    return repr(str(name)[:80])
