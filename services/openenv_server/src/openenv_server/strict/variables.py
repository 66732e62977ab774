"""Variables with the scopes of Python, in the place of the interpreter's copies.

The interpreter copies all variables for a function call, so that a closure sees those of the
past; it takes a variable with a similar name where one is missing, and counts `n += 1` on a
missing `n` from zero. Here a "copy" is an inner scope, and what is missing is missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from openenv_server.names import Names

__all__ = ["GLOBAL", "LOCAL", "NONLOCAL", "UNSET", "Variables", "unbound"]

GLOBAL, NONLOCAL, LOCAL = "global@", "nonlocal@", "local@"
"""A tuple of names assigned to one of these says whose they are in this scope."""


class _Unset:
    """Type of `UNSET`."""


UNSET = _Unset()
"""Value of a local variable that has none yet; it hides the outer variable of that name."""

_MISSING: Any = object()


class Variables(Names):
    """One scope. `copy` gives a scope inside it."""

    _outer: Variables | None = None
    _elsewhere: dict[str, str] | None = None

    def __init__(self, *, max_output_chars: int, imports: Iterable[str], seed: int | None) -> None:
        super().__init__(
            max_output_chars=max_output_chars, imports=imports, seed=seed, counts=False
        )

    def copy(self) -> Variables:
        """Open a scope inside this one."""
        inner = Variables.__new__(Variables)
        self._share(inner)
        inner._outer = self
        return inner

    def _find(self, name: Any) -> Any:
        scope: Variables | None = self
        while scope is not None:
            value: Any = super(Variables, scope).get(name, _MISSING)
            if value is not _MISSING:
                return value
            scope = scope._outer
        return _MISSING

    def __contains__(self, name: object) -> bool:
        found = self._find(name)
        return found is not _MISSING and found is not UNSET

    def __missing__(self, name: str) -> Any:
        found = self._find(name)
        if found is _MISSING:
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, value: Any) -> None:
        if name in (GLOBAL, NONLOCAL):
            self._elsewhere = {**(self._elsewhere or {}), **dict.fromkeys(value, name)}
        elif name == LOCAL:
            self.update(dict.fromkeys(value, UNSET))
        elif self._elsewhere and name in self._elsewhere:
            self._home(name)[name] = value
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        if self._elsewhere and name in self._elsewhere:
            del self._home(name)[name]
        elif self._outer is None:
            super().__delitem__(name)
        else:
            super().__setitem__(name, UNSET)

    def _home(self, name: str) -> Variables:
        """Find the scope that a `global` or `nonlocal` name lives in."""
        scope = cast("Variables", self._outer)
        only_module = cast("dict[str, str]", self._elsewhere)[name] == GLOBAL
        while scope._outer is not None and (only_module or not scope._has(name)):
            scope = scope._outer
        return scope

    def _has(self, name: str) -> bool:
        return super().__contains__(name)

    def is_unset(self, name: str) -> bool:
        """Tell whether `name` is a local variable without a value."""
        return self._outer is not None and self._find(name) is UNSET

    def keys(self) -> Any:
        """Give nothing: this is where the interpreter looks for similar names."""
        return dict[str, Any]().keys()

    def get(self, name: str, default: Any = None) -> Any:
        """Look a name up, for `name += ...`.

        Raises:
            NameError: It is missing.
        """
        if name in self:
            return self[name]
        if self.is_unset(name):
            raise unbound(name)
        raise NameError(f"name {name!r} is not defined", name=name)


def unbound(name: str) -> UnboundLocalError:
    """Make the error of reading a local variable without a value."""
    return UnboundLocalError(
        f"cannot access local variable {name!r} where it is not associated with a value"
    )
