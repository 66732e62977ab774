"""Rewrites code so that the stock interpreter does with it what CPython does.

`smolagents.local_python_executor` walks the syntax tree and passes over what it does not know:
decorators, `else` of a loop, `sep=` of `print`, `!r` in an f-string; it loses `return` inside
`try ... except Exception`, lets a global beat a default, and more. Each visitor turns one of these
into constructs the interpreter gets right. What cannot be turned is refused, with its line.

Hidden names hold an `@`, which no name in the code can; the helpers are in `runtime.py`.
"""

from __future__ import annotations

import ast

from openenv_server.strict.definitions import Definitions

__all__ = ["prepare"]


def prepare(tree: ast.Module, *, first: int = 0) -> tuple[ast.Module, int]:
    """Rewrite a module.

    Args:
        tree: What `ast.parse` gave; it is changed.
        first: First number for hidden names, from the last call of the same session.

    Returns:
        The module, and `first` for the next call.

    Raises:
        RefusedError: There is something in it that would be silently wrong.
    """
    work = Definitions(first)
    tree.body = work.block(tree.body)
    return ast.fix_missing_locations(tree), work.count
