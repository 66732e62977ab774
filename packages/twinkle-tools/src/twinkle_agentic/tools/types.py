"""The shapes that travel between a model, its tools and its environments.

They are the chat-completions shapes as `TypedDict`s: plain dicts at run time, so trajectories made
by another framework fit without conversion.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NoReturn, TypedDict, cast

__all__ = [
    "FunctionCall",
    "FunctionInfo",
    "Message",
    "ToolCall",
    "ToolInfo",
    "Trajectory",
    "user_data_dict",
    "user_data_get",
]


class FunctionInfo(TypedDict, total=False):
    """What a model is told about one function."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""
    strict: bool


class ToolInfo(TypedDict, total=False):
    """One entry of the `tools` list of a chat-completions request."""

    type: Literal["function"]
    function: FunctionInfo


class FunctionCall(TypedDict, total=False):
    """The function part of a tool call."""

    name: str
    arguments: str | dict[str, Any]
    """A JSON object as text (on the wire) or already parsed."""


class ToolCall(TypedDict, total=False):
    """One call made by an assistant message."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
    reasoning_content: str


class Trajectory(TypedDict, total=False):
    """The record of one episode, before (a prompt) and after (all turns) the rollout."""

    messages: list[Message]
    tools: list[ToolInfo]
    user_data: dict[str, Any] | list[tuple[str, str]]
    """Task data: a dict, or `(key, json text)` pairs as column stores need them."""


def user_data_dict(trajectory: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the task data of a trajectory as a dict.

    Args:
        trajectory: Any mapping. `user_data` may be a dict or a list (or array) of `(key, value)`
            pairs whose values are JSON text; text that is no JSON is kept as it is.

    Returns:
        A new dict; empty when there is no `user_data`. Of a key that occurs twice the first wins.

    Raises:
        ValueError: `trajectory` is no mapping, or `user_data` is neither of the two forms.
    """
    if trajectory is None:
        return {}
    if not isinstance(cast("object", trajectory), Mapping):
        raise ValueError(f"a trajectory must be a mapping, found {trajectory!r}")
    data: object = trajectory.get("user_data")
    if data is None:
        return {}
    if isinstance(data, Mapping):
        return dict(cast("Mapping[str, Any]", data))
    entries = _items(data)
    if entries is None:
        raise ValueError(_pair_message(data))
    found: dict[str, Any] = {}
    for entry in entries:
        pair = _items(entry)
        if pair is None or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(_pair_message(entry))
        found.setdefault(pair[0], _decoded(pair[1]))
    return found


def user_data_get(trajectory: Mapping[str, Any] | None, key: str, default: Any = None) -> Any:
    """Return one value of a trajectory's task data, or `default` where the key is absent."""
    return user_data_dict(trajectory).get(key, default)


def _items(value: object) -> list[Any] | None:
    """Return the items of a list, a tuple, or an array of a column store; else `None`."""
    if isinstance(value, (list, tuple)):
        return list(cast("Iterable[Any]", value))
    convert = getattr(value, "tolist", None)
    found = convert() if callable(convert) else None
    return cast("list[Any]", found) if isinstance(found, list) else None


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _pair_message(entry: object) -> str:
    return (
        "user_data must be a dict or a list of (key, json text) pairs, "
        f"found the entry {repr(entry)[:200]}"
    )
