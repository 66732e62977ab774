"""The text beside the first observation, from what the environment says of itself.

Only what is the same in process and over the network is used: the name of the environment, the JSON
Schema of its observations and the tools.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.envs.openenv._action_docs import read_action_docs
from twinkle_agentic.envs.openenv._tool_schemas import tool_name
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["environment_line", "field_meanings", "how_to_act"]

_SUFFIX = re.compile(r"(_?env(ironment)?)+$", re.IGNORECASE)
_MAX_MEANING_CHARS = 400


def environment_line(name: str | type | None) -> str:
    """Return a line that names an environment: `connect4_env` is `Environment: connect4`.

    Args:
        name: The package, a class, or `module:Class`.
    """
    if isinstance(name, type):
        name = name.__name__
    last = re.split(r"[.:]", name or "")[-1]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", _SUFFIX.sub("", last)).lower().strip("_")
    return f"Environment: {words.replace('_', ' ')}" if words else ""


def field_meanings(schema: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what the JSON Schema of an observation says of its fields and its metadata."""
    if schema is None:
        return {}
    _, meanings = read_action_docs(str(schema.get("description") or ""), None)
    properties: Any = schema.get("properties")
    if isinstance(properties, Mapping):
        for name, about in cast("Mapping[str, Any]", properties).items():
            if isinstance(about, Mapping) and (said := cast("Any", about).get("description")):
                meanings[name] = str(said)
    return {name: _one_line(said) for name, said in meanings.items()}


def how_to_act(tools: Sequence[ToolInfo]) -> str:
    """Return a few lines on the tools: of a single one, its arguments."""
    names = [name for tool in tools if (name := tool_name(tool))]
    if len(names) > 1:
        return f"To act, call one of these tools: {', '.join(names)}."
    if not names:
        return ""
    function: Mapping[str, Any] = next(tool["function"] for tool in tools if tool_name(tool))  # pyright: ignore[reportTypedDictNotRequiredAccess]
    parameters: Mapping[str, Any] = function.get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    lines = [f"To act, call {names[0]}" + (" with:" if properties else ".")]
    lines += [
        _argument(name, about, parameters, optional=name not in required)
        for name, about in properties.items()
    ]
    if said := str(function.get("description") or "").strip():
        lines.append(said)
    return "\n".join(lines)


def _argument(name: str, about: Any, parameters: Mapping[str, Any], *, optional: bool) -> str:
    field: Mapping[str, Any] = cast("Any", about) if isinstance(about, Mapping) else {}
    kinds = [_kind(each, parameters) for each in field.get("anyOf") or [field]]
    kind = " or ".join(k for k in kinds if k and k != "null")
    notes = ", ".join(note for note in (kind, "optional" if optional else "") if note)
    said = _one_line(str(field.get("description") or ""))
    return f"- {name}" + (f" ({notes})" if notes else "") + (f": {said}" if said else "")


def _kind(field: Any, parameters: Mapping[str, Any]) -> str:
    if not isinstance(field, Mapping):
        return ""
    about = cast("Mapping[str, Any]", field)
    defs: Mapping[str, Any] = parameters.get("$defs") or {}
    about = defs.get(str(about.get("$ref", "")).rsplit("/", 1)[-1], about)
    values: Any = about.get("enum")
    if isinstance(values, list):
        return "one of " + ", ".join(str(value) for value in cast("list[Any]", values))
    return str(about.get("type") or "")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MEANING_CHARS else f"{line[:_MAX_MEANING_CHARS]}..."
