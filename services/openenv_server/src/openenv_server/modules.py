"""What code gets for `import`: public names of a module, through an object of the session's own."""

from __future__ import annotations

import ast
import collections
import copy
import decimal
import importlib
import sys
import types
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

from openenv_server.interpreter import InterpreterError, install

__all__ = ["Module", "Modules"]

# Values that a module hands to everybody; each session gets its own.
_COPIED = (list, dict, set, bytearray, collections.deque, decimal.Context)


class Module:
    """A module as code sees it. Its names are found when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        find = self.__dict__.get("find@")
        if find is None or name.startswith("_"):
            raise AttributeError(name)
        value = self.__dict__[name] = find(name)
        return value

    def __repr__(self) -> str:
        return f"<module {self.__dict__.get('__name__')!r}>"


class Modules:
    """The modules of one session.

    Args:
        allowed: Names of modules that code may import.
        parts: Modules of which there are these names and no others.
        changed: Names that a session has in its own form, for modules that are there in whole.
    """

    def __init__(
        self,
        allowed: Iterable[str],
        *,
        parts: Mapping[str, Mapping[str, Any]],
        changed: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._allowed = sorted(allowed)
        self._loadable: set[str] = set(parts) & set(self._allowed)
        for name in self._allowed:  # `a.b` comes with `a`
            path = name.split(".")
            self._loadable.update(".".join(path[: end + 1]) for end in range(len(path)))
        self._parts, self._changed = parts, changed
        self._loaded: dict[str, Module] = {}

    def load(self, name: str) -> Module:
        """Import a module.

        Raises:
            InterpreterError: It is not among those allowed.
        """
        if name not in self._loadable:
            raise InterpreterError(
                f"Import of {name} is not allowed. Authorized imports are: {self._allowed}"
            )
        module = self._loaded.get(name)
        if module is None:
            module = self._loaded[name] = Module()
            part = self._parts.get(name)
            real = importlib.import_module(name)
            module.__dict__.update(part or {})
            module.__dict__["find@"] = partial(self._find if part is None else _not_here, real)
            module.__dict__["__name__"] = name
        return module

    def names(self, name: str) -> list[str]:
        """Names that `from ... import *` gives."""
        return _public(importlib.import_module(name))

    def _find(self, real: types.ModuleType, name: str) -> Any:
        changed = self._changed.get(real.__name__, {})
        if name in changed:
            return changed[name]
        root = real.__name__.partition(".")[0]
        if root in sys.stdlib_module_names and name not in _public(real):
            submodule = f"{real.__name__}.{name}"
            return self.load(submodule) if submodule in self._loadable else _not_here(real, name)
        value: Any = getattr(real, name)
        if isinstance(value, types.ModuleType):
            if value.__name__ in self._loadable:
                return self.load(value.__name__)
            _not_here(real, name)
        if isinstance(value, _COPIED):
            return copy.deepcopy(cast("Any", value))
        return value


def _public(real: types.ModuleType) -> list[str]:
    """Give the names a module of the library means to offer."""
    listed: Any = getattr(real, "__all__", None)
    if listed is not None:
        return list(listed)
    own: dict[str, Any] = vars(real)
    return [n for n, v in own.items() if n[0] != "_" and not isinstance(v, types.ModuleType)]


def _not_here(real: types.ModuleType, name: str) -> Any:
    if hasattr(real, name):  # CPython has it: no code may mistake that for absence
        raise InterpreterError(f"{real.__name__}.{name} is not available")
    raise AttributeError(f"module {real.__name__!r} has no attribute {name!r}", name=name)


def _evaluate_import(node: ast.Import | ast.ImportFrom, state: Any, _: object) -> None:
    modules: Modules = state.modules
    if isinstance(node, ast.Import):
        for alias in node.names:
            state[alias.asname or alias.name] = modules.load(alias.name)
        return
    source = node.module or "."
    module = modules.load("." * node.level + source if node.level else source)
    for alias in node.names:
        if alias.name == "*":
            for name in modules.names(source):
                state[name] = getattr(module, name)
            continue
        try:
            value = getattr(module, alias.name)
        except AttributeError:
            raise InterpreterError(f"Module {source} has no attribute {alias.name}") from None
        state[alias.asname or alias.name] = value


install(evaluate_import=_evaluate_import)
