"""Building blocks of the rewriting: small trees, scopes, signatures."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator

from openenv_server.strict.variables import UNSET

__all__ = [
    "PROTECTED",
    "RefusedError",
    "assign",
    "bound",
    "call",
    "constant",
    "flat",
    "forget",
    "load",
    "own_nodes",
    "signature",
]

_MISSING = object()
PROTECTED = ("print", "super")
"""Names that the interpreter treats by themselves, whatever they stand for."""


class RefusedError(Exception):
    """The code has a construct that would silently give a wrong result."""

    def __init__(self, node: ast.AST, text: str) -> None:
        super().__init__(text)
        self.line: int = getattr(node, "lineno", 0)


def load(name: str) -> ast.Name:
    """Make a variable that is read."""
    return ast.Name(id=name, ctx=ast.Load())


def assign(name: str, value: ast.expr) -> ast.Assign:
    """Make an assignment to a variable."""
    return ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value)


def call(helper: str, *args: ast.expr) -> ast.Call:
    """Make a call of a helper of `runtime.py`."""
    return ast.Call(func=load(f"{helper}@"), args=list(args), keywords=[])


def constant(value: object) -> ast.Constant:
    """Make a constant of any value."""
    # The interpreter returns the value of a constant as it is, whatever its type.
    return ast.Constant(value=value)  # pyright: ignore[reportArgumentType]


def forget(name: str) -> ast.Assign:
    """Make a statement after which a local variable has no value."""
    return assign(name, constant(UNSET))


def own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Walk statements, not the inside of functions, classes and comprehensions."""
    stop = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    stop += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    todo = list(body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, stop):
            todo.extend(ast.iter_child_nodes(node))


def bound(body: Iterable[ast.AST]) -> set[str]:
    """Names that statements bind in their own scope."""
    names: set[str] = set()
    for node in own_nodes(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def signature(args: ast.arguments) -> tuple[inspect.Signature, list[ast.expr]]:
    """Give the signature, defaults marked with `inspect.Parameter` order, and their expressions."""
    kinds = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    found: list[inspect.Parameter] = []
    values: list[ast.expr] = []
    for index, arg in enumerate(positional):
        kind = (
            kinds.POSITIONAL_ONLY if index < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        )
        if index >= first_default:
            values.append(args.defaults[index - first_default])
            found.append(kinds(arg.arg, kind, default=_MISSING))
        else:
            found.append(kinds(arg.arg, kind))
    if args.vararg:
        found.append(kinds(args.vararg.arg, kinds.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is None:
            found.append(kinds(arg.arg, kinds.KEYWORD_ONLY))
        else:
            values.append(default)
            found.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=_MISSING))
    if args.kwarg:
        found.append(kinds(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found), values


def flat(names: Iterable[str]) -> ast.arguments:
    """Every parameter as a plain one: the helper binds the arguments and passes all of them."""
    return ast.arguments(
        posonlyargs=[],
        args=[ast.arg(arg=name) for name in names],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[],
    )
