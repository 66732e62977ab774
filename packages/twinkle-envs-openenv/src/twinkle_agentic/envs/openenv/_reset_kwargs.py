"""What a reset hands to the environment, and whether it arrived.

Explicit: the adapter's `reset_kwargs`, and of the trajectory's `user_data` the keys `seed`,
`episode_id` and everything under `reset_kwargs`. What the environment cannot take of these is an
error. Offered: the other keys of `user_data` (or those named by `reset_keys`), labels for the
grader among them. They reach the environment where its `reset` has such a parameter, or takes any.
An environment that takes any and raises for one it does not know fails the reset: `reset_keys`
names those to send. Explicit wins over offered, the trajectory over the adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.tools.types import user_data_dict

__all__ = ["ResetKwargs", "collect_reset_kwargs", "fit_to_signature", "offered_hint"]

_ALWAYS_EXPLICIT = ("seed", "episode_id")
_NESTED = "reset_kwargs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetKwargs:
    """Keyword arguments of one reset.

    Attributes:
        explicit: Must arrive.
        offered: May be left out where the environment has no use for them.
    """

    explicit: dict[str, Any] = field(default_factory=dict[str, Any])
    offered: dict[str, Any] = field(default_factory=dict[str, Any])


def collect_reset_kwargs(
    reset_kwargs: Mapping[str, Any],
    trajectory: Mapping[str, Any] | None,
    reset_keys: Iterable[str] | None = None,
) -> ResetKwargs:
    """Gather the arguments of a reset.

    Args:
        reset_kwargs: Of the adapter.
        trajectory: The one about to be rolled out.
        reset_keys: Keys of `user_data` to offer; `None` offers all.

    Raises:
        ValueError: `user_data` or its `reset_kwargs` has no usable form.
    """
    data = user_data_dict(trajectory)
    nested: Any = data.pop(_NESTED, None) or {}
    if not isinstance(nested, Mapping):
        raise ValueError(
            f"user_data['reset_kwargs'] must be an object of keyword arguments, found {nested!r}"
        )
    explicit = dict(reset_kwargs)
    explicit.update({key: data.pop(key) for key in _ALWAYS_EXPLICIT if data.get(key) is not None})
    explicit.update(cast("Mapping[str, Any]", nested))
    wanted = None if reset_keys is None else set(reset_keys)
    offered = {
        key: value
        for key, value in data.items()
        if key not in explicit and key not in _ALWAYS_EXPLICIT and (wanted is None or key in wanted)
    }
    return ResetKwargs(explicit=explicit, offered=offered)


def offered_hint(offered: Iterable[str]) -> str:
    """Return what to do where one of the offered arguments may have failed a reset; or nothing."""
    names = sorted(offered)
    if not names:
        return ""
    return (
        f" (user_data also sent {', '.join(names)}: where the environment does not know one of "
        "them, pass reset_keys=[...] with the names to send)"
    )


def fit_to_signature(
    reset: Callable[..., Any], kwargs: ResetKwargs, *, strict: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Choose what an environment's `reset` takes.

    Returns:
        The arguments, and the explicit ones that are left out because `strict` is false.

    Raises:
        EnvError: An explicit argument is none of its parameters; the message lists them.
    """
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # a builtin says nothing about itself
        return {**kwargs.offered, **kwargs.explicit}, []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [parameter.name for parameter in parameters if parameter.kind in by_name]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return {**kwargs.offered, **kwargs.explicit}, []
    refused = [name for name in kwargs.explicit if name not in takes]
    if refused and strict:
        raise EnvError(
            f"the environment's reset has no parameter {', '.join(map(repr, refused))}: "
            f"it takes {', '.join(takes) or 'none'}; leave it out, or pass strict_reset=False"
        )
    taken = {**kwargs.offered, **kwargs.explicit}
    return {name: value for name, value in taken.items() if name in takes}, refused
