"""An MCP server as an env: one session for each episode.

Needs the extra: `pip install "twinkle-envs-core[mcp]"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import EnvTimeoutError, ErrorKind, SessionClosedError
from twinkle_agentic.tools.mcp import McpLostError, McpServer, McpToolError
from twinkle_agentic.tools.types import ToolInfo, Trajectory

__all__ = ["McpEnv"]


class McpEnv(Env):
    """The tools of an MCP server, with a session (and a server process) of its own per episode.

    It gives no reward: subclass it and override `evaluate`. Images of a result are in
    `info["images"]`. A tool that fails is an observation; a lost session and a call without an
    answer end the episode.

    Args:
        target: A URL, or the command that starts the server, as a list.
        **options: As for `McpServer`.

    Example:
        >>> rollout = APIMultiTurnRollout(
        ...     api, env_factory=lambda trajectory: McpEnv(["python", "weather_server.py"])
        ... )
    """

    def __init__(self, target: str | Sequence[str], **options: Any) -> None:
        self.server = McpServer(target, **options)
        self._ended: StepResult | None = None

    def tools(self) -> list[ToolInfo]:
        """Return the definitions of the server's tools; empty before `reset`."""
        return [tool.tool_info() for tool in self.server.tools()]

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Open a new session.

        Raises:
            SessionClosedError: There is no such server.
            EnvTimeoutError: It did not answer in time.
        """
        await self.server.aclose()
        self._ended = None
        try:
            await self.server.astart()
        except McpLostError as error:
            raise SessionClosedError(str(error)) from error
        except TimeoutError as error:
            raise EnvTimeoutError(str(error)) from error
        return StepResult()

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Call one tool."""
        if self._ended is not None:
            return self._ended
        try:
            result = await self.server.acall_tool(tool_name, arguments)
        except McpToolError as error:
            return StepResult.failed(str(error), kind=ErrorKind.TOOL, done=False)
        except McpLostError as error:
            self._ended = StepResult.failed(SessionClosedError(str(error)))
            return self._ended
        except TimeoutError as error:
            self._ended = StepResult.failed(EnvTimeoutError(str(error)))
            return self._ended
        if result.failed:
            return StepResult.failed(result.text, kind=ErrorKind.TOOL, done=False)
        images = [data for _, data in result.images]
        return StepResult(result.text, info={"images": images} if images else {})

    async def aclose(self) -> None:
        """Close the session."""
        await self.server.aclose()

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """As `areset`, from synchronous code."""
        return run_sync(self.areset(trajectory))

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """As `astep`, from synchronous code."""
        return run_sync(self.astep(tool_name, arguments))

    def close(self) -> None:
        """Close the session."""
        self.server.close()
