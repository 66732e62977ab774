"""`str.format`, which reads attributes by itself: here it reads public ones only."""

from __future__ import annotations

import string
import types
from collections import UserString
from collections.abc import Callable, Iterable
from typing import Any, cast

from openenv_server.interpreter import InterpreterError

__all__ = ["FRAME_NAMES", "guarded_format"]

_FRAME_NAMES = (
    "gi_frame gi_code gi_yieldfrom f_back f_globals f_locals f_builtins f_code tb_frame tb_next "
    "cr_frame cr_code cr_await ag_frame ag_code ag_await"
)
FRAME_NAMES = frozenset(_FRAME_NAMES.split())
"""Attributes of generators and tracebacks that lead to the variables of the server."""

_OF_USER_STRING: tuple[Any, ...] = (UserString.format, UserString.format_map)
_MAX_DEPTH = 3  # str.format itself nests two deep
_Fields = Iterable[tuple[str, str | None, str | None, str | None]]
_parse: Callable[[str], _Fields] = string.Formatter().parse


def guarded_format(found: Any, name: str) -> Any:
    """Give `format` or `format_map` of a text, such that its fields read nothing private.

    Args:
        found: What the attribute is; given back when it is not the method of `str`.
        name: `format` or `format_map`.
    """
    if getattr(found, "__func__", found) in _OF_USER_STRING:
        raise InterpreterError(f"{name}() of a UserString is not available: take str() of it first")
    if isinstance(found, types.BuiltinMethodType):
        text: Any = found.__self__
        if not isinstance(text, str):
            return found

        def format_this(*args: Any, **kwargs: Any) -> str:
            _check(str.__str__(text))
            return found(*args, **kwargs)

        return format_this
    if isinstance(found, types.MethodDescriptorType) and found is getattr(str, name):

        def format_that(text: str, *args: Any, **kwargs: Any) -> str:
            if isinstance(cast("Any", text), str):
                _check(str.__str__(text))
            return found(text, *args, **kwargs)

        return format_that
    return found


def _check(text: str, depth: int = 0) -> None:
    if depth > _MAX_DEPTH:
        return
    for _, field, spec, _ in _parse(text):
        # Everything after a dot is a name, whatever stands in brackets before it.
        for part in (field or "").split(".")[1:]:
            if part.startswith("_") or part.partition("[")[0] in FRAME_NAMES:
                raise InterpreterError(f"format() reads no attribute {part!r}: pass its value")
        if spec:
            _check(spec, depth + 1)
