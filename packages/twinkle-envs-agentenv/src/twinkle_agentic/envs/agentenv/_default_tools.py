"""The tools every sandbox has: their definitions and handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.tools.types import ToolInfo

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv._env import AgentEnv
    from twinkle_agentic.envs.base import StepResult

ToolHandler = Callable[["AgentEnv", dict[str, Any]], Any]
"""`handler(env, arguments) -> text` of a tool."""


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
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < 86_400 * 30:
        raise ToolFaultError(f"a timeout must be a number of seconds above 0, found {value!r}")
    return float(value)


def _run_command(env: AgentEnv, arguments: dict[str, Any]) -> str:
    _refuse_unknown("run_command", arguments, "command", "cwd", "timeout")
    # `timeout` is not offered, for the limit is the user's; a call may have less, never more.
    limit_s = env.spec.command_timeout_s
    if arguments.get("timeout") is not None:
        limit_s = min(limit_s, seconds_argument(arguments["timeout"]))
    return env.run_command({**arguments, "timeout": limit_s})


def _write_file(env: AgentEnv, arguments: dict[str, Any]) -> str:
    _refuse_unknown("write_file", arguments, "path", "content")
    path = text_argument(arguments, "path")
    content = text_argument(arguments, "content", empty=True)
    env.write_file(path, content)
    return f"Wrote {len(content)} characters to {path}."


def _read_file(env: AgentEnv, arguments: dict[str, Any]) -> str:
    _refuse_unknown("read_file", arguments, "path")
    path = text_argument(arguments, "path")
    return env.read_file(path).decode("utf-8", "replace")


def _run_code(env: AgentEnv, arguments: dict[str, Any]) -> StepResult:
    _refuse_unknown("run_code", arguments, "code")
    return env.run_code(text_argument(arguments, "code"))


def _refuse_unknown(tool_name: str, arguments: Mapping[str, Any], *takes: str) -> None:
    """Refuse arguments that a tool does not take: without them it would do another thing."""
    unknown = [name for name in arguments if name not in takes]
    if unknown:
        raise ToolFaultError(
            f"{tool_name!r} takes no {', '.join(map(repr, unknown))}: "
            f"it takes {', '.join(map(repr, takes))}"
        )


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


DEFAULT_TOOLS: dict[str, tuple[ToolInfo, ToolHandler]] = {
    "run_command": (
        _tool(
            "run_command",
            "Run a command with bash in the sandbox. Returns what it printed and, if it failed, "
            "its exit code.",
            command="The command line.",
            cwd="Directory to run it in; the home directory by default.",
        ),
        _run_command,
    ),
    "write_file": (
        _tool(
            "write_file",
            "Write a text file in the sandbox, replacing any that is there. Directories are made "
            "as needed.",
            path="Path of the file.",
            content="All of its text.",
        ),
        _write_file,
    ),
    "read_file": (
        _tool("read_file", "Return the text of a file in the sandbox.", path="Path of the file."),
        _read_file,
    ),
}
"""Definition and handler by name."""

CODE_TOOLS: dict[str, tuple[ToolInfo, ToolHandler]] = {
    "run_code": (
        _tool(
            "run_code",
            "Run Python in the sandbox. Variables, imports and functions stay for the next call. "
            "Returns what it printed, the value of its last expression, figures, and the traceback "
            "of an error.",
            code="The Python code.",
        ),
        _run_code,
    )
}
"""Likewise, of a sandbox with a code interpreter."""
