"""Binds the arguments of a call as CPython does, before a function of the interpreter runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["make_function"]


def make_function(
    called: tuple[str, str, str | None], signature: inspect.Signature, raw: Any, *defaults: Any
) -> Any:
    """Make the function that code sees.

    Args:
        called: Its `__name__`, `__qualname__` and docstring.
        signature: Parameters; each default in it stands for one of `defaults`, in order.
        raw: The interpreter's function, which takes every parameter by position.
        defaults: Evaluated where the function was defined.
    """
    name, qualified, doc = called
    parameters = signature.parameters.values()
    with_default = [p.name for p in parameters if p.default is not p.empty]
    filled: dict[str, Any] = dict(zip(with_default, defaults, strict=True))
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            filled[parameter.name] = ()
    var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    order = tuple(signature.parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            text = _complaint(signature, args, kwargs) or str(error)
            raise TypeError(f"{qualified}() {text}") from None
        values = filled | bound
        if var_keyword is not None:
            values.setdefault(var_keyword, {})
        return raw(*[values[parameter] for parameter in order])

    # The interpreter refuses to call a function by a name like `__len__`.
    call.__name__ = f"{name}@" if name.startswith("__") else name
    call.__qualname__ = qualified
    call.__module__ = "__main__"
    call.__doc__ = doc
    return call


def _complaint(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Say what does not fit, in CPython's words."""
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for keyword in kwargs:
            if keyword not in signature.parameters:
                return f"got an unexpected keyword argument {keyword!r}"
    for parameter in positional[: len(args)]:
        if parameter.name in kwargs and parameter.kind is not parameter.POSITIONAL_ONLY:
            return f"got multiple values for argument {parameter.name!r}"
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        required = sum(p.default is p.empty for p in positional)
        most = len(positional)
        takes = str(most) if required == most else f"from {required} to {most}"
        given = f"{len(args)} {'was' if len(args) == 1 else 'were'} given"
        return f"takes {takes} positional argument{'s' * (most != 1)} but {given}"
    for kind, candidates in (
        ("positional", positional[len(args) :]),
        ("keyword-only", [p for p in parameters if p.kind is p.KEYWORD_ONLY]),
    ):
        missing = [p.name for p in candidates if p.default is p.empty and p.name not in kwargs]
        if missing:
            plural = "s" * (len(missing) != 1)
            return f"missing {len(missing)} required {kind} argument{plural}: {_listed(missing)}"
    return None


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    if len(quoted) <= 2:
        return " and ".join(quoted)
    return ", ".join(quoted[:-1]) + f", and {quoted[-1]}"
