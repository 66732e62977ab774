"""Rewrites code so that the stock interpreter does with it what CPython does.

`smolagents.local_python_executor` walks the syntax tree and passes over what it does not know:
decorators, `else` of a loop, `sep=` of `print`, `!r` in an f-string; it loses `return` inside
`try ... except Exception`, lets a global beat a default, and more. Each visitor below turns one of
these into constructs the interpreter gets right. What cannot be turned is refused, with its line.

Hidden names hold an `@`, which no name in the code can; the helpers are in `runtime.py`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator

from openenv_server.runtime import SHIMS

__all__ = ["RefusedError", "prepare"]

_MISSING = object()
_PROTECTED = ("print", "super")  # the interpreter treats these two by name


class RefusedError(Exception):
    """The code has a construct that would silently give a wrong result."""

    def __init__(self, node: ast.AST, text: str) -> None:
        super().__init__(text)
        self.line: int = getattr(node, "lineno", 0)


def prepare(
    tree: ast.Module, *, first: int = 0, taken: Iterable[str] = ()
) -> tuple[ast.Module, int]:
    """Rewrite a module.

    Args:
        tree: What `ast.parse` gave; it is changed.
        first: First number for hidden names, from the last call of the same session.
        taken: Names the session has bound so far.

    Returns:
        The module, and `first` for the next call.

    Raises:
        RefusedError: There is something in it that would be silently wrong.
    """
    work = _Prepare(first, {*taken, *_bound(tree.body)})
    tree.body = work.block(tree.body)
    return ast.fix_missing_locations(tree), work.count


def _load(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Load())


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign(targets=[ast.Name(id=name, ctx=ast.Store())], value=value)


def _call(helper: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=_load(f"{helper}@"), args=list(args), keywords=[])


def _constant(value: object) -> ast.Constant:
    # The interpreter returns the value of a constant as it is, whatever its type.
    return ast.Constant(value=value)  # pyright: ignore[reportArgumentType]


def _own_nodes(
    body: Iterable[ast.AST], *, into: type[ast.AST] | tuple[()] = ()
) -> Iterator[ast.AST]:
    """Walk statements, not the inside of functions, classes and comprehensions."""
    stop = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    stop += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    todo = list(body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, stop) or isinstance(node, into):
            todo.extend(ast.iter_child_nodes(node))


def _bound(body: Iterable[ast.AST]) -> set[str]:
    """Names that statements bind in their own scope."""
    names: set[str] = set()
    for node in _own_nodes(body):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _signature(args: ast.arguments) -> tuple[inspect.Signature, list[ast.expr]]:
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


def _flat(signature: inspect.Signature) -> ast.arguments:
    """Every parameter as a plain one: the helper binds the arguments and passes all of them."""
    return ast.arguments(
        posonlyargs=[],
        args=[ast.arg(arg=name) for name in signature.parameters],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[],
    )


class _Prepare(ast.NodeTransformer):
    """Rewrites one module. `outer` holds the names that enclosing scopes bind."""

    def __init__(self, first: int, outer: set[str]) -> None:
        self.count = first
        self._outer = outer
        self._loops: list[str | None] = []  # flag of each enclosing loop that has an else
        self._caught: list[str] = []  # variable of each enclosing except
        self._classes: list[tuple[str, str]] = []  # name and hidden name of each enclosing class
        self._self: str | None = None  # first parameter of the enclosing method

    def hidden(self, name: str) -> str:
        self.count += 1
        return f"{name}@{self.count}"

    def block(self, body: Iterable[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in body:
            new: ast.stmt | list[ast.stmt] = self.visit(statement)
            for made in new if isinstance(new, list) else [new]:
                ast.copy_location(made, statement)
                done.append(made)
        return done

    # --- names -----------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _PROTECTED:
            if not isinstance(node.ctx, ast.Load):
                raise RefusedError(node, f"the name {node.id!r} cannot be given another value")
            node.id += "@"
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        node.value = self.visit(node.value)
        name = node.attr
        if name in ("__name__", "__class__", "__doc__") and isinstance(node.ctx, ast.Load):
            return ast.copy_location(_call("special", node.value, _constant(name)), node)
        if name.startswith("__") and not name.endswith("__") and self._classes:
            node.attr = f"_{self._classes[-1][0].lstrip('_')}{name}"
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for alias in node.names:
            self._check_binding(node, alias.asname or alias.name)
            if alias.name in SHIMS:
                done.append(_assign(alias.asname or alias.name, _load(f"{alias.name}@")))
            else:
                done.append(ast.Import(names=[alias]))
        return done

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        for alias in node.names:
            self._check_binding(node, alias.asname or alias.name)
        if node.module == "__future__":
            return []
        if node.module not in SHIMS or node.level or node.names[0].name == "*":
            return [node]
        return [
            _assign(
                alias.asname or alias.name,
                ast.Attribute(value=_load(f"{node.module}@"), attr=alias.name, ctx=ast.Load()),
            )
            for alias in node.names
        ]

    def _check_binding(self, node: ast.AST, name: str) -> None:
        if name in _PROTECTED:
            raise RefusedError(node, f"the name {name!r} cannot be given another value")

    # --- functions -------------------------------------------------------------------------

    def visit_FunctionDef(self, node: ast.FunctionDef) -> list[ast.stmt]:
        return self._function(node, node.name)

    def _function(self, node: ast.FunctionDef, bind_to: str) -> list[ast.stmt]:
        self._check_binding(node, bind_to)
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg):
                self._check_binding(node, arg.arg)
        before: list[ast.stmt] = []
        decorators: list[str] = []
        for decorator in node.decorator_list:
            decorators.append(self.hidden("decorator"))
            before.append(_assign(decorators[-1], self.visit(decorator)))
        signature, defaults = _signature(node.args)
        defaults = [self.visit(default) for default in defaults]
        name = self.hidden(node.name)
        body = self._function_body(node, signature)
        made: ast.expr = _call(
            "function", _constant(node.name), _constant(signature), _load(name), *defaults
        )
        for decorator in reversed(decorators):
            made = ast.Call(func=_load(decorator), args=[made], keywords=[])
        function = ast.FunctionDef(
            name=name, args=_flat(signature), body=body, decorator_list=[], returns=None
        )
        return [*before, function, _assign(bind_to, made)]

    def _function_body(self, node: ast.FunctionDef, signature: inspect.Signature) -> list[ast.stmt]:
        params = set(signature.parameters)
        own = _bound(node.body) - params
        saved = self._loops, self._caught, self._self, self._outer
        self._loops, self._caught = [], []
        self._self = next(iter(signature.parameters), None)
        self._outer = self._outer | own | params
        body = self.block(node.body)
        self._loops, self._caught, self._self, self._outer = saved
        # A local that is read before it is bound is an error, not the outer variable's value.
        unbound: list[ast.stmt] = []
        for local in sorted(own & self._outer):
            unbound += [
                _assign(local, _constant(None)),
                ast.Delete(targets=[ast.Name(id=local, ctx=ast.Del())]),
            ]
        return [*unbound, *body, ast.Return(value=_constant(None))]

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        signature, defaults = _signature(node.args)
        for name in signature.parameters:
            self._check_binding(node, name)
        defaults = [self.visit(default) for default in defaults]
        plain = ast.Lambda(args=_flat(signature), body=self.visit(node.body))
        made = _call("function", _constant("<lambda>"), _constant(signature), plain, *defaults)
        return ast.copy_location(made, node)

    # --- classes ---------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> list[ast.stmt]:
        return self._class(node, node.name)

    def _class(self, node: ast.ClassDef, bind_to: str) -> list[ast.stmt]:
        """Run the body in the enclosing scope under hidden names, then make the class of them."""
        self._check_binding(node, bind_to)
        hidden = self.hidden(node.name)
        before: list[ast.stmt] = []
        decorators: list[str] = []
        for decorator in node.decorator_list:
            decorators.append(self.hidden("decorator"))
            before.append(_assign(decorators[-1], self.visit(decorator)))
        bases = self.hidden("bases")
        before.append(_assign(bases, self.visit(ast.Tuple(elts=node.bases, ctx=ast.Load()))))
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        self._classes.append((node.name, hidden))
        saved, self._self = self._self, None
        body, bound, fields = self._class_body(node, hidden)
        self._classes.pop()
        self._self = saved
        made = _call(
            "class",
            _constant(node.name),
            _load(bases),
            _constant(ast.get_docstring(node)),
            _constant(tuple(fields)),
            _constant(tuple(bound)),
            *(_load(f"{hidden}.{name}") for name in bound),
        )
        made.keywords = keywords
        result: ast.expr = _load(hidden)
        for decorator in reversed(decorators):
            result = ast.Call(func=_load(decorator), args=[result], keywords=[])
        return [*before, *body, _assign(hidden, made), _assign(bind_to, result)]

    def _class_body(
        self, node: ast.ClassDef, hidden: str
    ) -> tuple[list[ast.stmt], dict[str, None], list[str]]:
        body: list[ast.stmt] = []
        bound: dict[str, None] = {}  # in the order of the class body
        fields: list[str] = []
        for statement in node.body:
            rename = _RenameClassNames(hidden, set(bound))
            if isinstance(statement, ast.FunctionDef):
                rename.outside(statement)
                made = self._function(statement, f"{hidden}.{statement.name}")
                bound[statement.name] = None
            elif isinstance(statement, ast.ClassDef):
                rename.outside(statement)
                made = self._class(statement, f"{hidden}.{statement.name}")
                bound[statement.name] = None
            else:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    self._field(statement, fields, statement.target.id)
                    if statement.value is None:
                        continue
                if isinstance(statement, ast.Import | ast.ImportFrom | ast.Delete):
                    raise RefusedError(statement, "this statement is not possible in a class body")
                names = _bound([statement])
                bound.update(dict.fromkeys(sorted(names)))
                made = self.block([rename.visit(statement)])
            body += [ast.copy_location(new, statement) for new in made]
        return body, bound, fields

    def _field(self, statement: ast.AnnAssign, fields: list[str], name: str) -> None:
        annotation = ast.unparse(statement.annotation)
        for special in ("ClassVar", "InitVar", "KW_ONLY"):
            if special in annotation:
                raise RefusedError(statement, f"{special} has no effect in this interpreter")
        fields.append(name)

    # --- calls and displays ----------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            if not self._classes or self._self is None:
                raise RefusedError(node, "super() without arguments works in a method only")
            made = _call("super", _load(self._classes[-1][1]), _load(self._self))
            return ast.copy_location(made, node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _PROTECTED:
            node.func = _call("getattr", node.func.value, _constant(node.func.attr))
        self.generic_visit(node)
        return node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        if node.conversion != -1:
            node.value = _call({115: "str", 114: "repr", 97: "ascii"}[node.conversion], node.value)
            node.conversion = -1
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
        return ast.copy_location(_call(helper, *node.elts), node)

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        parts: list[ast.expr] = []
        for key, value in zip(node.keys, node.values, strict=True):
            value = self.visit(value)
            if key is None:
                parts.append(value)
            else:
                parts.append(ast.Dict(keys=[self.visit(key)], values=[value]))
        if None in node.keys:
            return ast.copy_location(_call("dict_of", *parts), node)
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
        made = self._comprehension(node)
        if len(node.generators) == 1:
            return made
        whole = ast.ListComp(elt=node.elt, generators=node.generators)
        return ast.copy_location(_call("iter", whole), node)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> ast.expr:
        targets: set[str] = set()
        for generator in node.generators:
            targets |= _bound([generator.target])
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

    # --- assignments -----------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        unpacks = [t for t in node.targets if isinstance(t, ast.Tuple | ast.List)]
        if len(node.targets) == 1 and unpacks:
            target = unpacks[0]
            starred = [i for i, e in enumerate(target.elts) if isinstance(e, ast.Starred)]
            value = self.visit(node.value)
            if starred:
                at = starred[0]
                after = len(target.elts) - at - 1
                value = _call("spread", value, _constant(at), _constant(after))
                element = target.elts[at]
                assert isinstance(element, ast.Starred)
                target.elts[at] = element.value
            elif not isinstance(value, ast.Tuple):
                value = _call("unpack", value, _constant(len(target.elts)))
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
            before.append(_assign(holder, self.visit(target.value)))
            target.value = _load(holder)
            if isinstance(target, ast.Subscript):
                key = self.hidden("key")
                before.append(_assign(key, self.visit(target.slice)))
                target.slice = _load(key)
        node.target = self.visit(target)
        return [*before, node]

    # --- control flow ----------------------------------------------------------------------

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        node.iter = self.visit(node.iter)
        if isinstance(node.target, ast.Tuple | ast.List) and any(
            isinstance(element, ast.Starred) for element in node.target.elts
        ):
            item = self.hidden("item")
            node.body.insert(0, ast.Assign(targets=[node.target], value=_load(item)))
            node.target = ast.Name(id=item, ctx=ast.Store())
        node.target = self.visit(node.target)
        return self._loop(node)

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        node.test = self.visit(node.test)
        return self._loop(node)

    def _loop(self, node: ast.For | ast.While) -> list[ast.stmt]:
        flag = self.hidden("ended") if node.orelse else None
        self._loops.append(flag)
        node.body = self.block(node.body)
        self._loops.pop()
        if flag is None:
            return [node]
        orelse = ast.If(test=_load(flag), body=self.block(node.orelse), orelse=[])
        node.orelse = []
        return [_assign(flag, _constant(True)), node, orelse]

    def visit_Break(self, node: ast.Break) -> list[ast.stmt]:
        flag = self._loops[-1] if self._loops else None
        return [node] if flag is None else [_assign(flag, _constant(False)), node]

    def visit_Try(self, node: ast.Try) -> ast.stmt:
        node.body = self.block(node.body)
        for handler in node.handlers:
            self._handler(handler)
        node.orelse = self.block(node.orelse)
        node.finalbody = self.block(node.finalbody)
        return node

    def _handler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._check_binding(node, node.name)
        kind = _load("BaseException") if node.type is None else self.visit(node.type)
        node.type = _call("handles", kind)
        caught = self.hidden("caught")
        before: list[ast.stmt] = [_assign(caught, _call("caught", _load(caught)))]
        if node.name:
            before.append(_assign(node.name, _load(caught)))
        node.name = caught
        self._caught.append(caught)
        node.body = [*before, *self.block(node.body)]
        self._caught.pop()

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        self.generic_visit(node)
        if node.exc is None and self._caught:
            node.exc = _load(self._caught[-1])
        return node

    def visit_With(self, node: ast.With) -> ast.stmt:
        for inner in _leaves(node.body):
            raise RefusedError(
                inner, "leaving a `with` block by return, break or continue: end the block first"
            )
        self.generic_visit(node)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        node.test = self.visit(node.test)
        node.body = self.block(node.body)
        node.orelse = self.block(node.orelse)
        return node


def _leaves(body: Iterable[ast.AST], *, in_loop: bool = False) -> Iterator[ast.AST]:
    """Find the statements that leave a block."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Return) or (
            isinstance(node, ast.Break | ast.Continue) and not in_loop
        ):
            yield node
        looping = in_loop or isinstance(node, ast.For | ast.While)
        yield from _leaves(ast.iter_child_nodes(node), in_loop=looping)


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
