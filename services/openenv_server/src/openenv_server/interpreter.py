"""The server's own copy of `smolagents`' interpreter; the library has no types.

A second instance of the module, so that its `getattr`, `setattr`, `hasattr` and imports can be
those of `guard.py` and `modules.py` and the library stays as it is for everybody else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

__all__ = [
    "BASE_IMPORTS",
    "BASE_PYTHON_TOOLS",
    "CONTROL_FLOW",
    "InterpreterError",
    "LocalPythonExecutor",
    "evaluate_ast",
    "install",
    "second_instance",
]


def second_instance(name: str) -> Any:
    """Load a module once more, beside the one everybody has."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be found: install smolagents")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_module: Any = second_instance("smolagents.local_python_executor")

BASE_IMPORTS: tuple[str, ...] = tuple(_module.BASE_BUILTIN_MODULES)
"""Modules the interpreter lets code import of itself."""

BASE_PYTHON_TOOLS: dict[str, Any] = _module.BASE_PYTHON_TOOLS
"""Builtins of the interpreter, and functions of `math` among them."""

CONTROL_FLOW: tuple[type[Exception], ...] = (
    _module.BreakException,
    _module.ContinueException,
    _module.ReturnException,
)
"""How the interpreter carries out `break`, `continue` and `return`."""

InterpreterError: type[ValueError] = _module.InterpreterError
"""Raised for what the interpreter cannot do, and in the place of some of Python's exceptions."""

# The `__module__` of what code defines, as in CPython. `namedtuple` and its like take that of their
# caller: Python 3.11 reads it off the module, later ones off the function.
_module.__name__ = _module.evaluate_call.__module__ = "__main__"

LocalPythonExecutor: Any = _module.LocalPythonExecutor
"""The interpreter with its own idea of a session, for the `stock` executor."""

evaluate_ast: Any = _module.evaluate_ast
"""`evaluate_ast(node, state, static_tools, custom_tools, authorized_imports)` runs one node."""


def install(**functions: Callable[..., Any]) -> None:
    """Have the interpreter call these in the place of builtins and of functions of its own."""
    for name, function in functions.items():
        setattr(_module, name, function)
        if name in BASE_PYTHON_TOOLS and name != "getattr":  # that one has a default of its own
            BASE_PYTHON_TOOLS[name] = function
