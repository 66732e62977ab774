"""Tools an agent can call, and the manager that runs them."""

from __future__ import annotations

from twinkle_agentic.tools._arguments import ArgumentsError
from twinkle_agentic.tools._outcome import ToolErrorKind, ToolOutcome
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.function_tool import FunctionTool
from twinkle_agentic.tools.tool_manager import ToolManager
from twinkle_agentic.tools.types import Message, ToolCall, ToolInfo, Trajectory

__all__ = [
    "ArgumentsError",
    "FunctionTool",
    "Message",
    "Tool",
    "ToolCall",
    "ToolErrorKind",
    "ToolInfo",
    "ToolManager",
    "ToolOutcome",
    "Trajectory",
]
