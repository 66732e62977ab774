"""Rewrites expressions."""

# ruff: noqa: D102  # a visitor's name says what it rewrites

from __future__ import annotations

import ast

from openenv_server.names import INTERNAL
from openenv_server.strict.nodes import PROTECTED, RefusedError, bound, call, constant, flat, load
from openenv_server.strict.nodes import signature as signature_of
from openenv_server.strict.scope import Scope

__all__ = ["Expressions", "private_name"]

_NAMES = (
    "new init_subclass post_init setattr delattr eq ne lt le gt ge hash len iter next reversed "
    "getitem setitem delitem contains missing call enter exit bool int float index abs neg pos "
    "add radd sub rsub mul rmul truediv floordiv mod pow and or xor invert format bytes"
)
# The interpreter calls no function by such a name; these give no way around its other bars.
_CALLABLE = frozenset(f"__{name}__" for name in _NAMES.split())

# What the interpreter calls; any other expression goes through a helper.
_DIRECT = (ast.Call, ast.Lambda, ast.Attribute, ast.Name, ast.Subscript)


def private_name(class_name: str, name: str) -> str:
    """Give the name that `__name` in a class body stands for."""
    if name.startswith("__") and not name.endswith("__"):
        return f"_{class_name.lstrip('_')}{name}"
    return name


class Expressions(Scope):
    """Names, calls, displays, comprehensions and lambdas."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in PROTECTED:
            if not isinstance(node.ctx, ast.Load):
                raise RefusedError(node, f"the name {node.id!r} cannot be given another value")
            node.id += "@"
        if node.id in INTERNAL:
            raise RefusedError(node, f"the name {node.id!r} belongs to the interpreter")
        if node.id == "__class__" and self.classes:
            return ast.copy_location(load(self.classes[-1][1]), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.value = self.visit(node.value)
        name = node.attr
        if name in ("__name__", "__class__", "__doc__") and isinstance(node.ctx, ast.Load):
            return ast.copy_location(call("special", node.value, constant(name)), node)
        if self.classes:
            node.attr = private_name(self.classes[-1][0], name)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        signature, defaults = signature_of(node.args)
        for name in signature.parameters:
            self.check_binding(node, name)
        defaults = [self.visit(default) for default in defaults]
        plain = ast.Lambda(args=flat(signature.parameters), body=self.visit(node.body))
        made = call(
            "function",
            constant(("<lambda>", f"{self.path}<lambda>", None)),
            constant(signature),
            plain,
            *defaults,
        )
        return ast.copy_location(made, node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            if not self.classes or self.first_parameter is None:
                raise RefusedError(node, "super() without arguments works in a method only")
            made = call("super", load(self.classes[-1][1]), load(self.first_parameter))
            return ast.copy_location(made, node)
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if self.classes:
                name = private_name(self.classes[-1][0], name)
            if name in _CALLABLE:
                node.args = [node.func.value, constant(name), *node.args]
                node.func = load("call_method@")
            else:  # the interpreter looks a method up twice, and `print` by its name
                node.func = call("method", node.func.value, constant(name))
        elif not isinstance(node.func, _DIRECT):
            node.func = call("same", node.func)
        self.generic_visit(node)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.UAdd):  # the interpreter gives the operand back, whatever it is
            return ast.copy_location(call("pos", node.operand), node)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        if node.conversion != -1:
            node.value = call({115: "str", 114: "repr", 97: "ascii"}[node.conversion], node.value)
            node.conversion = -1
        elif node.format_spec is None:
            node.value = call("format", node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            return ast.copy_location(call("matmul", node.left, node.right), node)
        return node

    def visit_List(self, node: ast.List) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return self._display("list_of", node)
        return self.visit(ast.copy_location(ast.Tuple(elts=node.elts, ctx=node.ctx), node))

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        if isinstance(node.ctx, ast.Load):
            return self._display("tuple_of", node)
        if any(isinstance(element, ast.Starred) for element in node.elts):
            raise RefusedError(node, "a starred name is possible in a plain assignment only")
        self.generic_visit(node)
        return node

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return self._display("set_of", node)

    def _display(self, helper: str, node: ast.List | ast.Tuple | ast.Set) -> ast.expr:
        self.generic_visit(node)
        if not any(isinstance(element, ast.Starred) for element in node.elts):
            return node
        return ast.copy_location(call(helper, *node.elts), node)

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        parts: list[ast.expr] = []
        for key, value in zip(node.keys, node.values, strict=True):
            value = self.visit(value)
            if key is None:
                parts.append(value)
            else:
                parts.append(ast.Dict(keys=[self.visit(key)], values=[value]))
        if None in node.keys:
            return ast.copy_location(call("dict_of", *parts), node)
        node.keys = [part.keys[0] for part in parts if isinstance(part, ast.Dict)]
        node.values = [part.values[0] for part in parts if isinstance(part, ast.Dict)]
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        return self._comprehension(node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        return self._comprehension(node)

    def visit_DictComp(self, node: ast.DictComp) -> ast.expr:
        return self._comprehension(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.expr:
        self._comprehension(node)
        first, *others = node.generators
        iterable = self.hidden("iterable")
        # The first iterable is evaluated here, the rest when items are asked for.
        opened = ast.Call(func=load("iter@"), args=[first.iter], keywords=[])
        first.iter = load(iterable)
        if others:  # the interpreter takes several `for` as one after the other
            inner = ast.GeneratorExp(elt=node.elt, generators=others)
            node = ast.GeneratorExp(elt=self._nested(inner), generators=[first])
            made: ast.expr = call("chain", node)
        else:
            made = node
        lazy = ast.Lambda(args=flat([iterable]), body=made)
        return ast.copy_location(ast.Call(func=lazy, args=[opened], keywords=[]), node)

    def _nested(self, node: ast.GeneratorExp) -> ast.expr:
        first, *others = node.generators
        if not others:
            return node
        inner = ast.GeneratorExp(elt=node.elt, generators=others)
        return call("chain", ast.GeneratorExp(elt=self._nested(inner), generators=[first]))

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> ast.expr:
        targets: set[str] = set()
        for generator in node.generators:
            targets |= bound([generator.target])
        for inner in ast.walk(node):
            if isinstance(inner, ast.Lambda):
                own = {arg.arg for arg in ast.walk(inner.args) if isinstance(arg, ast.arg)}
                used = {n.id for n in ast.walk(inner.body) if isinstance(n, ast.Name)}
                if used & targets - own:
                    raise RefusedError(
                        inner,
                        "a lambda in a comprehension would not see its variable as Python does: "
                        "give it the value as a default, `lambda i=i: ...`",
                    )
        self.generic_visit(node)
        return node
