"""The interface of a tool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from twinkle_agentic._aio.bounded import finish_async
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["Tool", "ToolInfo"]


class Tool(ABC):
    """Something a model can call by name.

    A subclass gives `tool_info` and `__call__`; one that can await overrides `acall` too.

    Attributes:
        timeout_s: Seconds a call may take before the caller stops waiting; `None` leaves it to the
            `ToolManager`.
    """

    timeout_s: float | None = None

    @abstractmethod
    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Run one call.

        Args:
            tool_name: The name the model used; it matters to objects that serve several names.
            arguments: Checked against the schema of `tool_info` when the call comes from a
                `ToolManager`.

        Returns:
            The text for the model. Any other value is rendered by the manager (`to_text`).

        Raises:
            Exception: Whatever goes wrong; the manager turns it into an error text.
        """

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """Return the definition shown to the model; `function.name` must not be empty."""

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Run one call without blocking the event loop; by default `__call__` in a thread."""
        return await run_blocking(self, tool_name, arguments)

    def call_value(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Run one call and return its value, of which calling the tool may give the text only."""
        return self(tool_name, arguments)

    async def acall_value(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Run one call without blocking the event loop; as `call_value`."""
        return await finish_async(self.acall(tool_name, arguments))

    def abandon(self, reason: str) -> Any:
        """Note that the caller stopped waiting for a running call (its timeout, a cancellation).

        A tool with state behind it marks that state as unknown here. Does nothing by default.

        Returns:
            The `ToolOutcome.value` of the abandoned call.
        """
        return None
