"""Rewrite tests so that what they check is counted, with code constants in place of names.

A constant of a code object cannot be replaced by a solution, as a global name can.
"""

# pyright: basic, reportPrivateUsage=false, reportAttributeAccessIssue=false
# Values of any kind pass through here.
from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = ["PLACES", "Instrument", "bound_names", "count_sites", "free_names", "with_constants"]

PLACES = {
    name: f"\0verdict:{name}" for name in ("reached", "compare", "combine", "call", "solution")
}
_BUILTIN = "\0verdict:builtin:"
# Functions that compare what they are given where no comparison stands in the tests.
_COMPARING = {"isclose", "allclose", "array_equal", "issubset", "issuperset", "isdisjoint", "count"}
_COMPARING |= {"index", "difference", "intersection", "symmetric_difference"}
_COMPARING |= {f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains")}
_BLOCKS = {"assertRaises", "assertRaisesRegex", "assertWarns", "assertWarnsRegex", "assertLogs"}
_BLOCKS |= {"assertNoLogs", "raises", "warns", "RaisesGroup"}


def is_assert_call(node: ast.AST) -> bool:
    """Tell whether a node is `x.assertX(...)`, `x.fail()`, `np.testing.assert_x(...)`."""
    if not isinstance(node, ast.Call):
        return False
    name = _name_of(node)
    return name.startswith("assert") or name in ("fail", "run_testcase")


def is_block(node: ast.With | ast.AsyncWith) -> bool:
    """Tell whether a `with` expects an exception, as `self.assertRaises(...)` does."""
    calls = (item.context_expr for item in node.items)
    return any(isinstance(c, ast.Call) and _name_of(c) in _BLOCKS for c in calls)


def count_sites(tree: ast.AST) -> int:
    """Count the places that check something."""
    return sum(_is_site(node) for node in ast.walk(tree))


def _is_site(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.Raise):
        return True
    if isinstance(node, ast.With | ast.AsyncWith):
        return is_block(node)
    return is_assert_call(node)


def _name_of(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def bound_names(tree: ast.AST) -> set[str]:
    """Return every name that is bound anywhere in the source, in whatever scope."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Global | ast.Nonlocal):
            found.update(node.names)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


def free_names(tree: ast.AST, provides: Iterable[str] = ()) -> list[str]:
    """Return the names the source expects of the solution, in the order of their first use."""
    own = bound_names(tree) | {"__name__", "__file__", "__doc__", "__builtins__", "__class__"}
    known = {name for name in dir(builtins) if name not in set(provides)}
    names = (n for n in ast.walk(tree) if isinstance(n, ast.Name))
    found = {n.id: (n.lineno, n.col_offset) for n in names if n.id not in own | known}
    return sorted(found, key=lambda name: found[name])


class Instrument(ast.NodeTransformer):
    """Rewrites tests.

    Args:
        tree: The whole tests.
        provides: Names that the solution defines though they are those of builtins.
        modules: The modules that the tests import, by their full names.
        names_of_solution: Whether names that are defined nowhere in the tests are the solution's.
    """

    def __init__(
        self,
        tree: ast.AST,
        *,
        provides: Iterable[str],
        modules: Mapping[str, Any],
        names_of_solution: bool = True,
    ) -> None:
        self.sites = 0
        self.imported = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name) not in modules
        }
        self.plain_arithmetic = self.plain_comparisons = 0
        self.modules = modules
        self.constants: dict[str, object] = {}
        bound = bound_names(tree)
        self.free = set(free_names(tree, provides)) if names_of_solution else set[str]()
        self.builtins = {n for n in dir(builtins) if n not in bound | set(provides)}
        self.builtins -= {"__import__", "super", "locals", "globals", "vars", "dir", "eval", "exec"}
        self.builtins -= {"__build_class__", "__debug__", "__name__", "__doc__", "__spec__"}

    def _call(self, place: str, node: ast.expr | ast.stmt, *args: ast.expr) -> ast.Call:
        return _at(ast.Call(ast.Constant(PLACES[place]), list(args), []), node)

    def _reached(self, node: ast.stmt) -> ast.stmt:
        self.sites += 1
        number = ast.Constant(self.sites - 1)
        return _at(ast.Expr(self._call("reached", node, number)), node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id in self.free:
            place = ast.Constant(PLACES["solution"])
            return _at(ast.Attribute(place, node.id, ast.Load()), node)
        if node.id in self.builtins:
            return _at(ast.Constant(_BUILTIN + node.id), node)
        return node

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node, self._reached(node)]

    def visit_Expr(self, node: ast.Expr) -> Any:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        checks = is_assert_call(value) and _name_of(cast("ast.Call", value)) != "fail"
        self.generic_visit(node)
        return [node, self._reached(node)] if checks else node

    def _visit_with(self, node: ast.With | ast.AsyncWith) -> Any:
        checks = is_block(node)
        self.generic_visit(node)
        return [node, self._reached(node)] if checks else node

    visit_With = _visit_with
    visit_AsyncWith = _visit_with

    def visit_If(self, node: ast.If) -> Any:
        # `if f(2) != 4: raise ...` checks something wherever it goes on.
        checks = any(isinstance(n, ast.Raise) for part in node.body for n in ast.walk(part))
        self.generic_visit(node)
        return [node, self._reached(node)] if checks else node

    def _asks_solution(self, node: ast.AST) -> bool:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        return bool(names & (self.free | self.imported))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if self.plain_comparisons:
            return node
        names = ast.Constant(" ".join(type(op).__name__ for op in node.ops))
        return self._call("compare", node, names, node.left, *node.comparators)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        name = ast.Constant(type(node.op).__name__)
        constant = isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
        if constant or self.plain_arithmetic:
            return node
        return self._call("combine", node, name, node.left, node.right)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        compares = is_assert_call(node) or _name_of(node) in _COMPARING
        # A callback is handed to the solution, which may read its code (`inspect.signature`): it
        # must hold nothing of ours.
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for value in values:
            if isinstance(value, ast.Lambda) and not self._asks_solution(value):
                self.plain_comparisons += 1
                self.plain_arithmetic += 1
                value.body = self.visit(value.body)
                self.plain_comparisons -= 1
                self.plain_arithmetic -= 1
        done = {id(v) for v in values if isinstance(v, ast.Lambda) and not self._asks_solution(v)}
        node.func = self.visit(node.func)
        node.args = [a if id(a) in done else self.visit(a) for a in node.args]
        for keyword in node.keywords:
            if id(keyword.value) not in done:
                keyword.value = self.visit(keyword.value)
        if compares:
            place = ast.Constant(PLACES["call"])
            return _at(ast.Call(place, [node.func, *node.args], node.keywords), node)
        return node

    def _constant(self, value: object) -> ast.Constant:
        place = f"\0verdict:object:{len(self.constants)}"
        self.constants[place] = value
        return ast.Constant(place)

    def visit_Import(self, node: ast.Import) -> Any:
        new: list[ast.stmt] = []
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            if alias.name not in self.modules or name not in self.modules:
                new.append(_at(ast.Import([alias]), node))
                continue
            target = ast.Name(alias.asname or name, ast.Store())
            new.append(_at(ast.Assign([target], self._constant(self.modules[name])), node))
        return new

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = self.modules.get(node.module or "")
        new: list[ast.stmt] = []
        for alias in node.names:
            value = self.modules.get(f"{node.module}.{alias.name}", None)
            if value is None and module is not None:
                value = getattr(module, alias.name, None)
            if node.level or value is None:
                return node
            target = ast.Name(alias.asname or alias.name, ast.Store())
            new.append(_at(ast.Assign([target], self._constant(value)), node))
        return new

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Any:
        plain = not self._asks_solution(node)
        self.plain_arithmetic += plain
        self.generic_visit(node)
        self.plain_arithmetic -= plain
        if node.name.startswith("test"):
            end = _at(ast.Expr(self._call("reached", node.body[-1], ast.Constant(-1))), node)
            node.body = [s for one in node.body for s in _with_ends(one, end)] + [end]
        return node

    visit_FunctionDef = _visit_function
    visit_AsyncFunctionDef = _visit_function

    # Patterns, annotations of types and format strings need their constants as they are.
    def visit_Match(self, node: ast.Match) -> ast.stmt:
        node.subject = self.visit(node.subject)
        for case in node.cases:
            case.guard = self.visit(case.guard) if case.guard else None
            body = [self.visit(statement) for statement in case.body]
            flat = [n for part in body for n in (part if isinstance(part, list) else [part])]
            case.body = cast("list[ast.stmt]", flat)
        return node


def _with_ends(node: ast.stmt, end: ast.stmt) -> list[ast.stmt]:
    """Say at each `return` of a test that it ends."""
    if isinstance(node, ast.Return):
        return [end, node]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                parts = cast("list[ast.stmt]", inner)
                setattr(node, field, [s for one in parts for s in _with_ends(one, end)])
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            part.body = [s for one in part.body for s in _with_ends(one, end)]
    return [node]


def _at(node: Any, place: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(node, place))


def with_constants(code: types.CodeType, values: Mapping[str, object]) -> types.CodeType:
    """Put objects in the place of the constants that stand for them."""
    return code.replace(co_consts=tuple(_constant(const, values) for const in code.co_consts))


def _constant(const: Any, values: Mapping[str, object]) -> Any:
    if isinstance(const, types.CodeType):
        return with_constants(const, values)
    if isinstance(const, tuple):
        return tuple(_constant(one, values) for one in cast("tuple[Any, ...]", const))
    if isinstance(const, frozenset):
        return frozenset(_constant(one, values) for one in cast("frozenset[Any]", const))
    if isinstance(const, str) and const.startswith(_BUILTIN):
        return getattr(builtins, const.removeprefix(_BUILTIN))
    return values.get(const, const) if isinstance(const, str) else const
