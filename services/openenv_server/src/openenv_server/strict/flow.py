"""Rewrites assignments, imports and control flow."""

# ruff: noqa: D102  # a visitor's name says what it rewrites

from __future__ import annotations

import ast

from openenv_server.strict.expressions import Expressions
from openenv_server.strict.nodes import assign, call, constant, forget, load

__all__ = ["Flow"]


class Flow(Expressions):
    """Statements that define nothing."""

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for alias in node.names:
            self.check_binding(node, alias.asname or alias.name)
            if alias.asname is None and "." in alias.name:  # binds the outermost package
                hidden = self.hidden("import")
                done.append(ast.Import(names=[ast.alias(name=alias.name, asname=hidden)]))
                alias = ast.alias(name=alias.name.partition(".")[0])
            done.append(ast.Import(names=[alias]))
        return done

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        for alias in node.names:
            self.check_binding(node, alias.asname or alias.name)
        return [] if node.module == "__future__" else [node]

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        unpacks = [t for t in node.targets if isinstance(t, ast.Tuple | ast.List)]
        if len(node.targets) == 1 and unpacks:
            target = unpacks[0]
            starred = [i for i, e in enumerate(target.elts) if isinstance(e, ast.Starred)]
            value = self.visit(node.value)
            if starred:
                at = starred[0]
                after = len(target.elts) - at - 1
                value = call("spread", value, constant(at), constant(after))
                element = target.elts[at]
                assert isinstance(element, ast.Starred)
                target.elts[at] = element.value
            elif not isinstance(value, ast.Tuple):
                value = call("unpack", value, constant(len(target.elts)))
            node.value = value
            node.targets = [self.visit(target)]
            return node
        self.generic_visit(node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        node.value = self.visit(node.value)
        target = node.target
        before: list[ast.stmt] = []
        # The interpreter evaluates the target twice.
        if not isinstance(target, ast.Name) and any(
            isinstance(n, ast.Call) for n in ast.walk(target)
        ):
            holder = self.hidden("target")
            before.append(assign(holder, self.visit(target.value)))
            target.value = load(holder)
            if isinstance(target, ast.Subscript):
                key = self.hidden("key")
                before.append(assign(key, self.visit(target.slice)))
                target.slice = load(key)
        node.target = self.visit(target)
        return [*before, node]

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        node.iter = self.visit(node.iter)
        if isinstance(node.target, ast.Tuple | ast.List) and any(
            isinstance(element, ast.Starred) for element in node.target.elts
        ):
            item = self.hidden("item")
            node.body.insert(0, ast.Assign(targets=[node.target], value=load(item)))
            node.target = ast.Name(id=item, ctx=ast.Store())
        node.target = self.visit(node.target)
        return self._loop(node)

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        node.test = self.visit(node.test)
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> list[ast.stmt]:
        flag = self.hidden("ended") if node.orelse else None
        self.loops.append(flag)
        node.body = self.block(node.body)
        self.loops.pop()
        if flag is None:
            return [node]
        orelse = ast.If(test=load(flag), body=self.block(node.orelse), orelse=[])
        node.orelse = []
        return [assign(flag, constant(True)), node, orelse]

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        flag = self.loops[-1] if self.loops else None
        return [node] if flag is None else [assign(flag, constant(False)), node]

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        node.body = self.block(node.body)
        for handler in node.handlers:
            self._handler(handler)
        node.orelse = self.block(node.orelse)
        # What a bare `raise` means there depends on how the block was left.
        saved, self.caught = self.caught, []
        node.finalbody = self.block(node.finalbody)
        self.caught = saved
        return node

    def _handler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.check_binding(node, node.name)
        kind = load("BaseException") if node.type is None else self.visit(node.type)
        node.type = call("handles", kind)
        caught = self.hidden("caught")
        before: list[ast.stmt] = [assign(caught, call("caught", load(caught)))]
        given = node.name
        if given:
            before.append(assign(given, load(caught)))
        node.name = caught
        self.caught.append(caught)
        node.body = [*before, *self.block(node.body), *([forget(given)] if given else [])]
        self.caught.pop()

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        self.generic_visit(node)
        if node.exc is None and self.caught:
            node.exc = load(self.caught[-1])
        if node.exc is not None:
            node.exc = call("raising", node.exc)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        source = constant(ast.unparse(node))
        message = [] if node.msg is None else [self.visit(node.msg)]
        failed = ast.Raise(exc=call("assertion", source, *message))
        test = ast.UnaryOp(op=ast.Not(), operand=self.visit(node.test))
        return ast.If(test=test, body=[ast.copy_location(failed, node)], orelse=[])

    def visit_With(self, node: ast.With) -> ast.stmt:
        first, *others = node.items
        if others:  # the interpreter does not leave the first when entering the second fails
            inner = ast.With(items=others, body=node.body)
            node.body = [ast.copy_location(inner, node)]
        node.items = [first]
        first.context_expr = call("context", self.visit(first.context_expr))
        if first.optional_vars is not None and not isinstance(first.optional_vars, ast.Name):
            entered = self.hidden("entered")
            node.body.insert(0, ast.Assign(targets=[first.optional_vars], value=load(entered)))
            first.optional_vars = ast.Name(id=entered, ctx=ast.Store())
        elif first.optional_vars is not None:
            self.check_binding(node, first.optional_vars.id)
        node.body = self.block(node.body)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        node.test = self.visit(node.test)
        node.body = self.block(node.body)
        node.orelse = self.block(node.orelse)
        return node
