"""Tools an agent can call, and the manager that runs them."""

from __future__ import annotations

from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.function_tool import FunctionTool
from twinkle_agentic.tools.tool_manager import ToolManager, ToolOutcome
from twinkle_agentic.tools.types import Message, ToolCall, ToolInfo, Trajectory

__all__ = [
    "FunctionTool",
    "Message",
    "Tool",
    "ToolCall",
    "ToolInfo",
    "ToolManager",
    "ToolOutcome",
    "Trajectory",
]
