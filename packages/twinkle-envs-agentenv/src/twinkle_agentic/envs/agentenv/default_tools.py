"""The tools every sandbox has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["DEFAULT_TOOLS", "refuse_unknown", "seconds_argument", "text_argument"]


def _tool(name: str, description: str, **properties: str) -> ToolInfo:
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            key: {"type": "string", "description": text} for key, text in properties.items()
        },
        "required": [key for key in properties if key != "cwd"],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


DEFAULT_TOOLS: dict[str, ToolInfo] = {
    "run_command": _tool(
        "run_command",
        "Run a command with bash in the sandbox. Returns what it printed and, if it failed, its "
        "exit code.",
        command="The command line.",
        cwd="Directory to run it in; the home directory by default.",
    ),
    "write_file": _tool(
        "write_file",
        "Write a text file in the sandbox, replacing any that is there. Directories are made as "
        "needed.",
        path="Path of the file.",
        content="All of its text.",
    ),
    "read_file": _tool(
        "read_file",
        "Return the text of a file in the sandbox.",
        path="Path of the file.",
    ),
}
"""Definitions by name."""

_TAKES: dict[str, tuple[str, ...]] = {
    # `timeout` is not offered, for the limit is the user's; an action that gives it is obeyed.
    "run_command": ("command", "cwd", "timeout"),
    "write_file": ("path", "content"),
    "read_file": ("path",),
}


def refuse_unknown(tool_name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a default tool does not take: without them it would do another thing.

    Raises:
        ToolFaultError: There is one; the text names what the tool takes.
    """
    takes = _TAKES[tool_name]
    unknown = [name for name in arguments if name not in takes]
    if unknown:
        raise ToolFaultError(
            f"{tool_name!r} takes no {', '.join(map(repr, unknown))}: "
            f"it takes {', '.join(map(repr, takes))}"
        )


def text_argument(
    arguments: Mapping[str, Any], name: str, *, optional: bool = False, empty: bool = False
) -> str:
    """Return an argument that must be text."""
    value = arguments.get(name)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        found = "nothing" if value is None else type(value).__name__
        raise ToolFaultError(f"argument {name!r} must be text, found {found}")
    if not value and not (optional or empty):
        raise ToolFaultError(f"argument {name!r} is empty")
    return value


def seconds_argument(value: Any) -> float:
    """Return an argument that must be a number of seconds."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < 86_400 * 30
    ):
        raise ToolFaultError(f"a timeout must be a number of seconds above 0, found {value!r}")
    return float(value)
