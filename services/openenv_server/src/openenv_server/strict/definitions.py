"""Rewrites functions and classes."""

# ruff: noqa: D102  # a visitor's name says what it rewrites

from __future__ import annotations

import ast
import inspect

from openenv_server.strict.expressions import private_name
from openenv_server.strict.flow import Flow
from openenv_server.strict.nodes import (
    RefusedError,
    assign,
    bound,
    call,
    constant,
    flat,
    load,
    own_nodes,
)
from openenv_server.strict.nodes import signature as signature_of
from openenv_server.strict.variables import GLOBAL, LOCAL, NONLOCAL

__all__ = ["Definitions"]

_NOT_IN_CLASS = (ast.Import, ast.ImportFrom, ast.Delete, ast.Global, ast.Nonlocal)


class Definitions(Flow):
    """Functions and classes."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> list[ast.stmt]:
        return self._function(node, node.name)

    def _function(self, node: ast.FunctionDef, bind_to: str) -> list[ast.stmt]:
        self.check_binding(node, bind_to)
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg):
                self.check_binding(node, arg.arg)
        for inner in own_nodes(node.body):
            if isinstance(inner, ast.Yield | ast.YieldFrom):
                raise RefusedError(
                    inner, "`yield` is not possible in this interpreter: make a list"
                )
        before: list[ast.stmt] = []
        decorators: list[str] = []
        for decorator in node.decorator_list:
            decorators.append(self.hidden("decorator"))
            before.append(assign(decorators[-1], self.visit(decorator)))
        signature, defaults = signature_of(node.args)
        defaults = [self.visit(default) for default in defaults]
        name = self.hidden(node.name)
        body = self._function_body(node, signature)
        made: ast.expr = call(
            "function",
            constant((node.name, self.path + node.name, ast.get_docstring(node))),
            constant(signature),
            load(name),
            *defaults,
        )
        for decorator in reversed(decorators):
            made = ast.Call(func=load(decorator), args=[made], keywords=[])
        function = ast.FunctionDef(
            name=name, args=flat(signature.parameters), body=body, decorator_list=[], returns=None
        )
        return [*before, function, assign(bind_to, made)]

    def _function_body(self, node: ast.FunctionDef, signature: inspect.Signature) -> list[ast.stmt]:
        params = set(signature.parameters)
        own = bound(node.body) - params
        declared = [n for n in own_nodes(node.body) if isinstance(n, ast.Global | ast.Nonlocal)]
        saved = self.loops, self.caught, self.first_parameter, self.path
        self.path += f"{node.name}.<locals>."
        self.loops, self.caught = [], []
        self.first_parameter = next(iter(signature.parameters), None)
        body = self.block(node.body)
        self.loops, self.caught, self.first_parameter, self.path = saved
        # A local that is read before it is bound is an error, not the outer variable's value.
        elsewhere = {name for statement in declared for name in statement.names}
        local = tuple(sorted(own - elsewhere))
        unbound: list[ast.stmt] = [assign(LOCAL, constant(local))] if local else []
        for statement in declared:
            kind = GLOBAL if isinstance(statement, ast.Global) else NONLOCAL
            unbound.insert(0, assign(kind, constant(tuple(statement.names))))
        return [*unbound, *body, ast.Return(value=constant(None))]

    def visit_Global(self, node: ast.Global) -> list[ast.stmt]:
        return []  # said at the start of the function

    def visit_Nonlocal(self, node: ast.Nonlocal) -> list[ast.stmt]:
        return []

    def visit_ClassDef(self, node: ast.ClassDef) -> list[ast.stmt]:
        return self._class(node, node.name)

    def _class(self, node: ast.ClassDef, bind_to: str) -> list[ast.stmt]:
        """Run the body in the enclosing scope under hidden names, then make the class of them."""
        self.check_binding(node, bind_to)
        hidden = self.hidden(node.name)
        before: list[ast.stmt] = []
        decorators: list[str] = []
        for decorator in node.decorator_list:
            decorators.append(self.hidden("decorator"))
            before.append(assign(decorators[-1], self.visit(decorator)))
        bases = self.hidden("bases")
        before.append(assign(bases, self.visit(ast.Tuple(elts=node.bases, ctx=ast.Load()))))
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        self.classes.append((node.name, hidden))
        saved = self.first_parameter, self.path
        self.first_parameter, self.path = None, f"{self.path}{node.name}."
        body, names, fields = self._class_body(node, hidden)
        self.classes.pop()
        self.first_parameter, self.path = saved
        made = call(
            "class",
            constant((node.name, self.path + node.name, ast.get_docstring(node))),
            load(bases),
            constant(tuple(fields)),
            constant(tuple(private_name(node.name, name) for name in names)),
            *(load(f"{hidden}.{name}") for name in names),
        )
        made.keywords = keywords
        result: ast.expr = load(hidden)
        for decorator in reversed(decorators):
            result = ast.Call(func=load(decorator), args=[result], keywords=[])
        return [*before, *body, assign(hidden, made), assign(bind_to, result)]

    def _class_body(
        self, node: ast.ClassDef, hidden: str
    ) -> tuple[list[ast.stmt], dict[str, None], list[str]]:
        body: list[ast.stmt] = []
        names: dict[str, None] = {}  # in the order of the class body
        fields: list[str] = []
        for statement in node.body:
            rename = _RenameClassNames(hidden, set(names))
            if isinstance(statement, ast.FunctionDef):
                rename.outside(statement)
                made = self._function(statement, f"{hidden}.{statement.name}")
                names[statement.name] = None
            elif isinstance(statement, ast.ClassDef):
                rename.outside(statement)
                made = self._class(statement, f"{hidden}.{statement.name}")
                names[statement.name] = None
            else:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    self._field(statement, fields, statement.target.id)
                    if statement.value is None:
                        continue
                if isinstance(statement, _NOT_IN_CLASS):
                    raise RefusedError(statement, "this statement is not possible in a class body")
                names.update(dict.fromkeys(sorted(bound([statement]))))
                made = self.block([rename.visit(statement)])
            body += [ast.copy_location(new, statement) for new in made]
        return body, names, fields

    def _field(self, statement: ast.AnnAssign, fields: list[str], name: str) -> None:
        annotation = ast.unparse(statement.annotation)
        for special in ("ClassVar", "InitVar", "KW_ONLY"):
            if special in annotation:
                raise RefusedError(statement, f"{special} has no effect in this interpreter")
        fields.append(name)


class _RenameClassNames(ast.NodeTransformer):
    """Gives the names of a class body their hidden names, not inside functions."""

    def __init__(self, hidden: str, bound: set[str]) -> None:
        self._hidden = hidden
        self._bound = bound

    def outside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Rename in the parts of a definition that belong to the class body."""
        node.decorator_list = [self.visit(decorator) for decorator in node.decorator_list]
        if isinstance(node, ast.FunctionDef):
            node.args.defaults = [self.visit(default) for default in node.args.defaults]
            node.args.kw_defaults = [d and self.visit(d) for d in node.args.kw_defaults]
        else:
            node.bases = [self.visit(base) for base in node.bases]

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if not isinstance(node.ctx, ast.Load) or node.id in self._bound:
            node.id = f"{self._hidden}.{node.id}"
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        node.args.defaults = [self.visit(default) for default in node.args.defaults]
        node.args.kw_defaults = [d and self.visit(d) for d in node.args.kw_defaults]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        raise RefusedError(node, "a function under a condition in a class body")

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        return self._comprehension(node)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> ast.AST:
        node.generators[0].iter = self.visit(node.generators[0].iter)
        return node
