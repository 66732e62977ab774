"""An MCP server as an env: a session per episode."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from twinkle_agentic.envs.errors import SessionClosedError
from twinkle_agentic.envs.mcp import McpEnv

_SERVER = Path(__file__).parents[2] / "twinkle-tools" / "tests" / "servers" / "mcp_server.py"
_COMMAND = [sys.executable, str(_SERVER)]


def test_each_episode_has_a_session_of_its_own() -> None:
    with McpEnv(_COMMAND) as env:
        env.reset()
        names = [info.get("function", {}).get("name") for info in env.tools()]
        assert "count" in names
        assert [env.step("count", {}).observation for _ in range(2)] == ["1", "2"]
        env.reset()
        assert env.step("count", {}).observation == "1"


def test_images_of_a_result_are_in_info() -> None:
    with McpEnv(_COMMAND) as env:
        env.reset()
        result = env.step("picture", {})
    (image,) = result.info["images"]
    assert image.startswith(b"\x89PNG")
    assert result.observation.startswith("a dot")


def test_a_failing_tool_is_a_failed_step_and_the_episode_lives() -> None:
    with McpEnv(_COMMAND) as env:
        env.reset()
        result = env.step("fail", {"why": "no luck"})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert "no luck" in result.observation
        assert env.step("add", {"a": 1, "b": 1}).observation == "2"


def test_a_lost_server_ends_the_episode_until_reset() -> None:
    async def play() -> None:
        async with McpEnv(_COMMAND, call_timeout_s=20) as env:
            await env.areset()
            lost = await env.astep("die", {})
            assert (lost.done, lost.info["error_kind"]) == (True, "session_lost")
            again = await env.astep("add", {"a": 1, "b": 1})
            assert (again.done, again.info["error_kind"]) == (True, "session_lost")
            await env.areset()
            assert (await env.astep("add", {"a": 1, "b": 1})).observation == "2"

    asyncio.run(play())


def test_a_call_without_an_answer_ends_the_episode() -> None:
    with McpEnv(_COMMAND, call_timeout_s=0.5) as env:
        env.reset()
        result = env.step("wait", {"seconds": 30})
        assert (result.done, result.info["error_kind"]) == (True, "timeout")


def test_reset_without_a_server_raises() -> None:
    with pytest.raises(SessionClosedError, match="no session with the MCP server"):
        McpEnv(["/no/such/program"]).reset()
