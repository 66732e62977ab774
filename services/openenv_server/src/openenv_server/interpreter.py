"""The parts of `smolagents`' interpreter that are used here; the library has no types."""

from __future__ import annotations

from typing import Any

from smolagents import local_python_executor

__all__ = ["BASE_PYTHON_TOOLS", "CONTROL_FLOW", "InterpreterError", "evaluate_ast"]

_module: Any = local_python_executor

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

evaluate_ast: Any = _module.evaluate_ast
"""`evaluate_ast(node, state, static_tools, custom_tools, authorized_imports)` runs one node."""
