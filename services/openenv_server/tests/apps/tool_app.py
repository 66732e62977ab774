"""An MCP environment of OpenEnv's, served by `concurrent_app`."""

from __future__ import annotations

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from openenv_server.concurrent import concurrent_app


class ToolEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp: Any = FastMCP("tools")
        self.kept: list[str] = []

        @mcp.tool
        def keep(word: str) -> list[str]:  # pyright: ignore[reportUnusedFunction]
            """Keep a word, and give all."""
            self.kept.append(word)
            return self.kept

        super().__init__(mcp)
        self._state = State(episode_id="tools")

    def reset(self, **_: Any) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.kept = []
        return Observation(reward=0.0)

    def _step_impl(self, action: Action, **_: Any) -> Observation:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Observation(metadata={"error": f"unknown action {type(action).__name__}"})

    @property
    def state(self) -> State:
        return self._state


app = concurrent_app(
    ToolEnvironment,
    CallToolAction,
    CallToolObservation,
    State,
    name="tools",
    max_concurrent_envs=4,
    max_queue=0,
)
