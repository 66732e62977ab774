"""Tools of one env that run in the client's own process, such as `submit_solution`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from twinkle_agentic.envs.openenv._tool_schemas import tool_name
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["Handler", "LocalTools"]

Handler = Callable[[Any, dict[str, Any]], Any]
"""`handler(env, arguments)`: its result, as text, is the observation."""


class LocalTools:
    """Definitions and handlers by name."""

    def __init__(self) -> None:
        self._infos: dict[str, ToolInfo] = {}
        self._handlers: dict[str, Handler] = {}

    def register(self, tool_info: ToolInfo, handler: Handler) -> None:
        """Add a tool in place of an earlier one of its name.

        Raises:
            ValueError: It has no name.
            TypeError: `handler` cannot be called.
        """
        name = tool_name(tool_info)
        if not name:
            raise ValueError(f"tool_info must have function.name, found {tool_info!r}")
        if not callable(handler):
            raise TypeError(f"the handler of {name!r} must be callable, found {handler!r}")
        self._infos.pop(name, None)
        self._infos[name] = tool_info
        self._handlers[name] = handler

    def get(self, name: str) -> Handler | None:
        """Return the handler of a name."""
        return self._handlers.get(name)

    def merged(self, others: Iterable[ToolInfo]) -> list[ToolInfo]:
        """Return the other tools that are not overridden, then these."""
        kept = [tool for tool in others if tool_name(tool) not in self._infos]
        return [*kept, *self._infos.values()]
