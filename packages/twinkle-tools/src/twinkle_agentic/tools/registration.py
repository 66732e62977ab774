"""What makes an object a tool: looked at once, when it is registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic.tools.arguments import Validate, compile_schema
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["Entry", "make_entry", "name_of", "renamed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered tool and the check of its arguments."""

    tool: Any
    validate: Validate | None


def make_entry(tool: Any, name: object) -> Entry:
    """Look at a tool once, at registration, so that a call finds nothing wrong with it.

    Raises:
        ValueError: It is no tool, or its name, schema or limit is unusable.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool name must be a non-empty text, found {name!r}")
    function = _function_of(tool)
    check_limit("timeout_s", getattr(tool, "timeout_s", None), allow_none=True)
    parameters = function.get("parameters")
    return Entry(tool, compile_schema(parameters, tool_name=name) if parameters else None)


def name_of(tool: Any) -> str:
    """Return the name a tool gives itself.

    Raises:
        ValueError: It is no tool, or has no name.
    """
    name = _function_of(tool).get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"tool {type(tool).__name__} must have a non-empty tool_info()['function']['name'], "
            f"found {name!r}"
        )
    return name


def renamed(info: ToolInfo, name: str) -> ToolInfo:
    """Return a definition under another name, itself where the name is its own."""
    function = info.get("function", {})
    if function.get("name") == name:
        return info
    return {**info, "function": {**function, "name": name}}


def _function_of(tool: Any) -> Mapping[str, Any]:
    """Return the `function` part of a tool's definition, whatever kind of object the tool is."""
    if isinstance(tool, type) or not callable(tool) or not hasattr(tool, "tool_info"):
        raise ValueError(
            f"{tool!r} is no tool, for it has no tool_info() or cannot be called: "
            "wrap a plain function in FunctionTool, pass an object and not its class"
        )
    info: Any = cast("Any", tool).tool_info()
    function: Any = cast("Any", info).get("function") if isinstance(info, Mapping) else None
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}
