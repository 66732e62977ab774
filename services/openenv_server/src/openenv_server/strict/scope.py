"""What the rewriting knows about the place in the code it is at."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from openenv_server.strict.nodes import PROTECTED, RefusedError

__all__ = ["Scope"]


class Scope(ast.NodeTransformer):
    """State of the rewriting of one module.

    Attributes:
        count: Number of the last hidden name.
        path: Enclosing functions and classes, as `__qualname__` has them.
        loops: For each enclosing loop, the flag of its `else`.
        caught: For each enclosing `except`, the variable with its exception.
        classes: Name and hidden name of each enclosing class.
        first_parameter: That of the enclosing method.
    """

    def __init__(self, first: int) -> None:
        self.count = first
        self.path = ""
        self.loops: list[str | None] = []
        self.caught: list[str] = []
        self.classes: list[tuple[str, str]] = []
        self.first_parameter: str | None = None

    def hidden(self, name: str) -> str:
        """Make a name that no code can write."""
        self.count += 1
        return f"{name}@{self.count}"

    def block(self, body: Iterable[ast.stmt]) -> list[ast.stmt]:
        """Rewrite statements, each into as many as it takes."""
        done: list[ast.stmt] = []
        for statement in body:
            new: ast.stmt | list[ast.stmt] = self.visit(statement)
            for made in new if isinstance(new, list) else [new]:
                ast.copy_location(made, statement)
                done.append(made)
        return done

    def check_binding(self, node: ast.AST, name: str) -> None:
        """Refuse a new value for a name that the interpreter treats by itself."""
        if name in PROTECTED:
            raise RefusedError(node, f"the name {name!r} cannot be given another value")
