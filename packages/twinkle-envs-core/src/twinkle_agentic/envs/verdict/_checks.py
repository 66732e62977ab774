"""Faults of tests that show before anything runs."""

from __future__ import annotations

import ast

from twinkle_agentic.envs.verdict._guest.instrument import count_sites
from twinkle_agentic.envs.verdict.types import TaskFaultError

__all__ = ["parse_tests"]


def parse_tests(tests: str) -> ast.Module:
    """Parse tests.

    Raises:
        TaskFaultError: They are no Python, check nothing, or hold a comparison whose result is
            thrown away, as where `assert` was forgotten.
    """
    if not tests.strip():
        raise TaskFaultError("they are empty, so every solution would pass")
    try:
        tree = ast.parse(tests, "<tests>")
        compile(tree, "<tests>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # nested too deeply
        line = error.lineno if isinstance(error, SyntaxError) else None
        why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise TaskFaultError(f"no valid Python: {why}", line=line) from error
    expected = {
        id(statement)
        for block in ast.walk(tree)
        if isinstance(block, ast.With | ast.AsyncWith | ast.Try)
        for statement in block.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and id(node) not in expected and _is_claim(node.value):
            raise TaskFaultError(
                f"`{ast.unparse(node)[:80]}` compares and does nothing with it: write `assert`",
                line=node.lineno,
            )
    if not count_sites(tree):
        raise TaskFaultError(
            "they have no assert, no call of an assert method and no raise, so they tell no wrong "
            "solution from a right one"
        )
    _check_called(tree)
    return tree


def _is_claim(node: ast.expr) -> bool:
    if isinstance(node, ast.BoolOp):
        # `ready or fail()` does something.
        return all(_is_claim(value) for value in node.values)
    return isinstance(node, ast.Compare) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def _check_called(tree: ast.Module) -> None:
    """Refuse tests whose checks all stand in functions that nothing calls."""
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    used |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test") or node.name in used or node.decorator_list:
                left.extend(node.body)
        elif isinstance(node, ast.ClassDef):
            if node.bases or node.name.startswith("Test") or node.name in used:
                left.extend(node.body)
            else:
                left.extend(n for n in node.body if not isinstance(n, ast.FunctionDef))
        elif isinstance(node, ast.Assert | ast.Raise | ast.Call):
            return
        else:
            left.extend(ast.iter_child_nodes(node))
    raise TaskFaultError(
        "all their checks stand in functions and classes that nothing calls: name them test... "
        "or call them"
    )
