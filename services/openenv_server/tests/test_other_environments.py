"""Environments other than the coding one, served by `concurrent_app` under plain uvicorn."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from openenv_server.concurrent import concurrent_app
from openenv_server.openenv_types import Action, Environment, Observation, State

LIMIT_S = 20.0
APPS = Path(__file__).parent / "apps"


def _uvicorn(serve: Any, app: str) -> Any:
    uvicorn = str(Path(sys.executable).with_name("uvicorn"))
    return serve([uvicorn, f"{app}:app", "--port", "0"], cwd=APPS)


@pytest.fixture(scope="module")
def waiting(serve: Any) -> Iterator[Any]:
    with _uvicorn(serve, "waiting_app") as server:
        yield server


@pytest.fixture(scope="module")
def tools(serve: Any) -> Iterator[Any]:
    with _uvicorn(serve, "tool_app") as server:
        yield server


def _get(server: Any, path: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + path, timeout=LIMIT_S) as answer:
        return json.load(answer)


async def _ask(ws: Any, kind: str, **data: Any) -> dict[str, Any]:
    await ws.send(json.dumps({"type": kind, "data": data}))
    return json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))


async def test_a_client_that_goes_in_the_middle_of_a_step_frees_its_slot(waiting: Any) -> None:
    ws = await connect(waiting.ws_url, proxy=None)
    await _ask(ws, "reset")
    await ws.send(json.dumps({"type": "step", "data": {}}))
    assert (await asyncio.to_thread(_get, waiting, "/capacity"))["sessions"] == 1
    ws.transport.abort()
    gone = time.monotonic()
    while (await asyncio.to_thread(_get, waiting, "/capacity"))["sessions"]:
        assert time.monotonic() < gone + 2
        await asyncio.sleep(0.02)
    await ws.close()


async def test_what_an_environment_may_do_leaves_the_session_usable(waiting: Any) -> None:
    async with connect(waiting.ws_url, proxy=None) as ws:
        answer = await _ask(ws, "step", how="exit")
        assert (answer["data"]["code"], answer["data"]["message"]) == ("EXECUTION_ERROR", "3")
        assert math.isnan((await _ask(ws, "step", how="nan"))["data"]["reward"])
        assert (await _ask(ws, "step", how="unwritable"))["data"]["code"] == "EXECUTION_ERROR"
        answer = await _ask(ws, "reset", difficulty="hard")
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        assert "['difficulty']: it takes seed, episode_id" in answer["data"]["message"]
        assert (await _ask(ws, "reset", seed=1))["type"] == "observation"


def test_importing_an_environment_without_openenv_imports_no_openenv(waiting: Any) -> None:
    maps = Path(f"/proc/{waiting.process.pid}/maps").read_text()
    assert "pydantic_core" in maps
    assert "pandas" not in maps


def test_sessions_that_would_mix_are_refused() -> None:
    class Shared(Environment[Action, Observation, State]):
        pass

    with pytest.raises(ValueError, match="SUPPORTS_CONCURRENT_SESSIONS"):
        concurrent_app(Shared, Action, Observation, State, name="shared", max_concurrent_envs=2)


def test_the_stock_mcp_client_uses_tools_in_its_session(tools: Any) -> None:
    client_module = pytest.importorskip("openenv.core.mcp_client")
    clients = [client_module.MCPToolClient(base_url=tools.url).sync() for _ in range(2)]
    for client in clients:
        client.connect()
        client.reset()
    (tool,) = clients[0].list_tools()
    assert tool.name == "keep"
    assert clients[0].call_tool("keep", word="a") == ["a"]
    assert clients[0].call_tool("keep", word="b") == ["a", "b"]
    assert clients[1].call_tool("keep", word="c") == ["c"]
    assert _get(tools, "/capacity")["sessions"] == 2
    for client in clients:
        client.close()
    deadline = time.monotonic() + LIMIT_S
    while _get(tools, "/capacity")["sessions"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_tools_over_the_websocket(tools: Any) -> None:
    async with connect(tools.ws_url, proxy=None) as ws:
        await _ask(ws, "reset")
        listing: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        answer = await _ask(ws, "mcp", **listing)
        assert [tool["name"] for tool in answer["data"]["result"]["tools"]] == ["keep"]
        fields = {"type": "call_tool", "tool_name": "keep", "arguments": {"word": "a"}}
        answer = await _ask(ws, "step", **fields)
        assert "a" in json.dumps(answer["data"]["observation"]["result"])
        answer = await _ask(ws, "mcp", jsonrpc="2.0", id=2, method="no/such")
        assert answer["data"]["error"]["code"] == -32601
