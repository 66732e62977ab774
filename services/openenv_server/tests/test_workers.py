"""Several worker processes, dead clients, and the worked example of the cookbook."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

LIMIT_S = 60.0
COOKBOOK = Path(__file__).parents[3] / "cookbook" / "rl" / "envs" / "openenv_server"


async def _enter(stack: contextlib.AsyncExitStack, server: Any) -> ClientConnection | None:
    """Connect; None when the worker that was met is full."""
    ws = await stack.enter_async_context(connect(server.ws_url, proxy=None))
    try:
        await ws.send(json.dumps({"type": "reset", "data": {}}))
        answer = json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))
    except ConnectionClosed:
        return None
    if answer["type"] == "error":
        assert answer["data"]["code"] == "CAPACITY_REACHED"
        return None
    return ws


async def _run(ws: ClientConnection, code: str) -> dict[str, Any]:
    await ws.send(json.dumps({"type": "step", "data": {"code": code}}))
    answer = json.loads(await asyncio.wait_for(ws.recv(), LIMIT_S))
    return answer["data"]["observation"]


async def test_the_workers_share_the_sessions(serve: Any, command: Any) -> None:
    options = ["--workers", "2", "--max-concurrent-envs", "3", "--max-queue", "0"]
    with serve([*command, *options, "--max-output-chars", "1000"]) as server:
        async with contextlib.AsyncExitStack() as stack:
            held: list[ClientConnection] = []
            for _ in range(3):
                ws = await _enter(stack, server)
                assert ws is not None
                held.append(ws)
            for _ in range(10):
                assert await _enter(stack, server) is None
            for ws in held:  # the options have reached the processes
                assert len((await _run(ws, "print('x' * 9000)"))["stdout"]) < 1_100


async def test_a_client_that_died_without_a_word_gives_its_slot_back(
    serve: Any, command: Any
) -> None:
    """A peer that never answers a ping: after interval + timeout its slot is free."""
    options = ["--max-concurrent-envs", "1", "--max-queue", "0"]
    options += ["--ping-interval-s", "0.5", "--ping-timeout-s", "0.5"]
    with serve([*command, *options]) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        key = base64.b64encode(os.urandom(16)).decode()
        writer.write(
            "GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert b"101" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        async with contextlib.AsyncExitStack() as stack:
            assert await _enter(stack, server) is None
            ws = None
            async with asyncio.timeout(LIMIT_S):
                while ws is None:
                    ws = await _enter(stack, server)
            assert (await _run(ws, "print('in')"))["stdout"] == "in\n"
        writer.close()


async def test_the_cookbook_server_runs_from_its_folder(serve: Any) -> None:
    uvicorn = str(Path(sys.executable).with_name("uvicorn"))
    env = {"MAX_CONCURRENT_ENVS": "2", "OPENENV_SERVER_MAX_QUEUE": "0"}
    with serve([uvicorn, "server_app:app", "--port", "0"], env=env, cwd=COOKBOOK) as server:
        async with contextlib.AsyncExitStack() as stack:
            held = [await _enter(stack, server) for _ in range(2)]
            assert await _enter(stack, server) is None
            for number, ws in enumerate(held):
                assert ws is not None
                await _run(ws, f"x = {number}")
            for number, ws in enumerate(held):
                assert ws is not None
                assert (await _run(ws, "print(x)"))["stdout"] == f"{number}\n"
