"""Tools of real MCP servers, over standard input and over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from twinkle_agentic.tools import ToolManager
from twinkle_agentic.tools.mcp import McpLostError, McpServer

_SERVER = Path(__file__).parent / "servers" / "mcp_server.py"
_COMMAND = [sys.executable, str(_SERVER)]


def _call(name: str, **arguments: object) -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)  # the end of a process of another parent is no event here


@pytest.fixture
def url() -> Generator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*_COMMAND, str(port)])
    deadline = time.monotonic() + 60
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)  # until it listens
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def test_the_tools_of_a_command_are_called_and_its_process_ends() -> None:
    with ToolManager.from_mcp(_COMMAND) as manager:
        assert {"add", "fail", "picture"} <= set(manager.names())
        functions = [info.get("function", {}) for info in manager.tool_infos()]
        (add,) = (each for each in functions if each.get("name") == "add")
        assert add.get("description") == "Add two numbers."
        assert set(add.get("parameters", {})["properties"]) == {"a", "b"}
        assert manager(_call("add", a=2, b=3)) == "5"
        pid = int(manager(_call("pid")))
    _wait_until_dead(pid)


def test_bad_arguments_and_failures_are_errors_for_the_model() -> None:
    with ToolManager.from_mcp(_COMMAND) as manager:
        outcome = manager.run(_call("add", a="two", b=3))
        assert outcome.error_kind == "invalid_arguments"
        outcome = manager.run(_call("fail", why="no luck"))
        assert outcome.error_kind == "tool"
        assert "no luck" in outcome.text
        assert manager(_call("add", a=1, b=1)) == "2"


def test_an_image_is_named_in_the_text_and_handed_over() -> None:
    with McpServer(_COMMAND) as server:
        result = asyncio.run(server.acall_tool("picture", {}))
    ((kind, data),) = result.images
    assert kind == "image/png"
    assert data.startswith(b"\x89PNG")
    assert result.text == f"a dot\n[image 1: image/png, {len(data)} bytes]"


def test_a_call_without_an_answer_times_out_and_the_session_lives() -> None:
    with McpServer(_COMMAND, call_timeout_s=0.5) as server:
        tools = {tool.name: tool for tool in server.tools()}
        with pytest.raises(TimeoutError, match=r"'wait' gave no answer within 0.5 s"):
            tools["wait"]("wait", {"seconds": 30})
        assert tools["add"]("add", {"a": 1, "b": 2}) == "3"


def test_a_server_that_dies_is_lost_and_can_be_started_again() -> None:
    server = McpServer(_COMMAND, call_timeout_s=20)
    with server:
        tools = {tool.name: tool for tool in server.tools()}
        with pytest.raises(McpLostError, match="ended during 'die'"):
            tools["die"]("die", {})
        with pytest.raises(McpLostError, match="call start"):
            tools["add"]("add", {"a": 1, "b": 2})
        server.start()
        assert asyncio.run(server.acall_tool("add", {"a": 1, "b": 2})).text == "3"


@pytest.mark.parametrize("target", [["/no/such/program"], "http://127.0.0.1:9/mcp"])
def test_no_server_says_which_one_was_asked(target: str | list[str]) -> None:
    with pytest.raises(McpLostError, match="no session with the MCP server"):
        McpServer(target).start()


def test_a_server_that_is_silent_does_not_hold_the_start() -> None:
    server = McpServer([sys.executable, "-c", "import time; time.sleep(60)"], connect_timeout_s=0.5)
    with pytest.raises(TimeoutError, match=r"did not answer within 0.5 s"):
        server.start()
    server.close()


def test_http_sessions_serve_calls_at_the_same_time(url: str) -> None:
    async def both() -> list[str]:
        async with McpServer(url) as server:
            slow = asyncio.create_task(server.acall_tool("wait", {"seconds": 0.5}))
            quick = await server.acall_tool("add", {"a": 1, "b": 2})
            assert not slow.done()
            return [quick.text, (await slow).text]

    assert asyncio.run(both()) == ["3", "done"]


def test_an_unknown_tool_is_refused_by_the_server(url: str) -> None:
    with McpServer(url) as server:
        result = asyncio.run(server.acall_tool("nothing", {}))
        assert result.failed
        assert "nothing" in result.text


def test_an_http_server_that_dies_in_the_middle_of_a_call_is_noticed(url: str) -> None:
    with McpServer(url, call_timeout_s=5) as server:
        with pytest.raises((McpLostError, TimeoutError)):
            asyncio.run(server.acall_tool("die", {}))
        with pytest.raises((McpLostError, TimeoutError)):
            asyncio.run(server.acall_tool("add", {"a": 1, "b": 1}))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="target is empty"):
        McpServer([])
    with pytest.raises(ValueError, match="call_timeout_s"):
        McpServer("http://127.0.0.1:9/mcp", call_timeout_s=0)
