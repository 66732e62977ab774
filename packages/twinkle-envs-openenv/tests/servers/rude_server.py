# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""A server that speaks OpenEnv's websocket protocol and misbehaves as its URL path says.

`ws://host:port/<behaviour>/<key>/ws`. `GET /stats` tells how many sessions are open under each key.
Prints its ports as one line of JSON when it is ready, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys
from collections import Counter, defaultdict
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

open_sessions: Counter[str] = Counter()
all_sessions: Counter[str] = Counter()
knocks: Counter[str] = Counter()
resets_held: Counter[str] = Counter()
headers_seen: dict[str, dict[str, str]] = {}
doors: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

_MCP_ACTION = {"properties": {"tool_name": {}, "arguments": {}}, "required": ["tool_name"]}


def observation(fields: dict[str, Any], *, reward: Any = 0.0, done: bool = False) -> str:
    data = {"observation": fields, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def error(code: str, message: str = "", **data: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **data}})


async def full(socket: ServerConnection) -> None:
    await socket.send(error("CAPACITY_REACHED", "full", active_sessions=1, max_sessions=1))
    await socket.close()


async def answer(
    socket: ServerConnection, behaviour: str, key: str, message: dict[str, Any]
) -> None:
    kind, data = message["type"], message.get("data") or {}
    if kind == "state":
        await socket.send(json.dumps({"type": "state", "data": {"episode_id": "server-made"}}))
        return
    if kind == "mcp":
        if behaviour == "drops_listing" and all_sessions[key] == 1:
            socket.transport.abort()
            return
        tools = [{"name": "look", "inputSchema": {"type": "object"}}]
        result = {"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}}
        await socket.send(json.dumps({"type": "mcp", "data": result}))
        return
    if kind == "reset":
        if behaviour == "reset_hangs" or data.get("hang"):
            resets_held[key] += 1
            return
        await socket.send(observation({"text": "ready", "got": data}))
        if behaviour == "unsolicited":
            await socket.send(observation({"text": "nobody asked"}))
        return
    if "delay" in data:
        await asyncio.sleep(data["delay"])
    match behaviour:
        case "duplicate":
            await socket.send(observation({"text": str(data.get("value"))}))
            await socket.send(observation({"text": str(data.get("value"))}))
        case "empty":
            await socket.send("")
        case "junk":
            await socket.send(b"\xff\x00")
        case "wrong_type":
            await socket.send(json.dumps({"type": "state", "data": {}}))
        case "no_data":
            await socket.send(json.dumps({"type": "observation", "data": [1]}))
        case "close":
            await socket.close(data.get("code", 1000), "bye")
        case "drop":
            socket.transport.abort()
        case "mute":
            return
        case "big":
            await socket.send(observation({"text": "x" * data["size"]}))
        case "error":
            await socket.send(error(data["code"], data.get("message", ""), **data.get("extra", {})))
        case "raw":
            await socket.send(data["frame"])
        case _:
            await socket.send(
                observation(
                    {"text": str(data.get("value")), "metadata": {"answer": 42}},
                    reward=data.get("reward", 0.5),
                    done=bool(data.get("end")),
                )
            )


async def serve_session(socket: ServerConnection) -> None:
    _, behaviour, key, *_ = socket.request.path.split("/")  # type: ignore[union-attr]
    all_sessions[key] += 1
    open_sessions[key] += 1
    headers_seen[key] = dict(socket.request.headers.raw_items())  # type: ignore[union-attr]
    try:
        if behaviour == "full" or (behaviour == "full_twice" and all_sessions[key] <= 2):
            await full(socket)
            return
        if behaviour == "factory":
            await socket.send(error("FACTORY_ERROR", "boom", factory_name="BadEnv"))
            await socket.close()
            return
        async for frame in socket:
            message = json.loads(frame)
            if message["type"] == "close":
                if behaviour == "slow_close":
                    await asyncio.sleep(60)
                return
            await answer(socket, behaviour, key, message)
    except ConnectionClosed:
        pass
    finally:
        open_sessions[key] -= 1


async def over_http(_: ServerConnection, request: Request) -> Response | None:
    def text(status: HTTPStatus, body: str) -> Response:
        from websockets.datastructures import Headers

        raw = body.encode()
        headers = Headers({"Content-Length": str(len(raw)), "Content-Type": "application/json"})
        return Response(status.value, status.phrase, headers, raw)

    if request.path.startswith("/stats"):
        stats = {
            "open": open_sessions,
            "all": all_sessions,
            "headers": headers_seen,
            "knocks": knocks,
            "held": resets_held,
        }
        return text(HTTPStatus.OK, json.dumps(stats))
    if request.path.startswith("/busy/"):
        return text(HTTPStatus.SERVICE_UNAVAILABLE, "no room")
    if request.path.startswith("/open_door/"):
        doors[request.path.rpartition("/")[2]].set()
        return text(HTTPStatus.OK, "{}")
    if request.path.startswith("/drops_listing/") and request.path.endswith("/schema"):
        return text(HTTPStatus.OK, json.dumps({"action": _MCP_ACTION}))
    if request.path.startswith("/deep_schema/") and request.path.endswith("/schema"):
        return text(HTTPStatus.OK, "[" * 100_000 + "]" * 100_000)
    if request.path.startswith("/long_schema/") and request.path.endswith("/schema"):
        return text(HTTPStatus.OK, json.dumps({"action": {"description": "x" * 100_000}}))
    if request.path.startswith("/any_schema/") and request.path.endswith("/schema"):
        return text(HTTPStatus.OK, json.dumps({"action": {"properties": {"value": {}}}}))
    if request.path.endswith("/schema"):
        behaviour = request.path.split("/")[1]
        number = behaviour.removeprefix("schema_") if behaviour.startswith("schema_") else "404"
        return text(HTTPStatus(int(number)), "{}")
    if not request.path.endswith("/ws"):
        return text(HTTPStatus.NOT_FOUND, "{}")
    if request.path.startswith("/slow_door/"):
        key = request.path.split("/")[2]
        knocks[key] += 1
        await doors[key].wait()
    return None


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take the connection and never answer the handshake."""
    open_sessions["hang"] += 1
    try:
        await reader.read()
    except ConnectionError:
        pass
    finally:
        open_sessions["hang"] -= 1
        writer.close()


async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Do the handshake, answer the first message, ignore all after: pings, closes."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET /schema"):
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()
        return
    fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    key = {name.lower(): value for name, value in fields.items()}["sec-websocket-key"]
    digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n"
    )
    await reader.read(1)
    payload = observation({"text": "ready"}).encode()
    writer.write(bytes([0x81, len(payload)]) + payload)
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    writer.close()


async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An HTTP proxy: tunnels for CONNECT, forwards for GET."""
    head = await reader.readuntil(b"\r\n\r\n")
    method, target, _ = head.decode().split(" ", 2)
    all_sessions[f"proxy {method}"] += 1
    host, _, port = target.removeprefix("http://").partition("/")[0].rpartition(":")
    back_reader, back_writer = await asyncio.open_connection(host, int(port))
    if method == "CONNECT":
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    else:
        back_writer.write(head.replace(f"http://{host}:{port}".encode(), b"", 1))

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(65536):
                sink.write(chunk)
        except ConnectionError:
            pass
        sink.close()

    await asyncio.gather(pump(reader, back_writer), pump(back_reader, writer))


async def main() -> None:
    async with (
        serve(
            serve_session,
            "127.0.0.1",
            0,
            process_request=over_http,
            max_size=16 * 2**20,
            compression=None,
            ping_interval=None,
        ) as rude,
        await asyncio.start_server(hang, "127.0.0.1", 0) as silent,
        await asyncio.start_server(deaf, "127.0.0.1", 0) as closed_ears,
        await asyncio.start_server(proxy, "127.0.0.1", 0) as between,
    ):
        ports = {
            "rude": next(iter(rude.sockets)).getsockname()[1],
            "hang": silent.sockets[0].getsockname()[1],
            "proxy": between.sockets[0].getsockname()[1],
            "deaf": closed_ears.sockets[0].getsockname()[1],
        }
        print(json.dumps(ports), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        os._exit(0)  # without waiting for sessions that never end


if __name__ == "__main__":
    asyncio.run(main())
