"""A chat-completions endpoint as cheap as Python makes it, for benchmarks; a process of its own.

    python benchmarks/model_endpoint.py --turns 4 --latency 0.2

Prints its port, then answers each request after the latency: with a call of the tool `echo` in the
first `turns - 1` turns of a conversation, with text in the last one. Ends when its standard input
does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys


def _reply(message: dict[str, object], finish: str) -> bytes:
    body = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "bench",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        }
    ).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _calling(turn: int) -> bytes:
    function = {"name": "echo", "arguments": '{"text": "some text to repeat"}'}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    message: dict[str, object] = {
        "role": "assistant",
        "content": "I will look.",
        "tool_calls": [call],
    }
    return _reply(message, "tool_calls")


class Endpoint(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, turns: int, latency_s: float) -> None:
        self.turns, self.latency_s = turns, latency_s
        self.buffer = b""
        self.replies = [_calling(turn) for turn in range(1, turns)]
        self.last = _reply({"role": "assistant", "content": "All done."}, "stop")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.index(b"content-length:") + 15
            length = int(head[at:].split(b"\r\n", 1)[0])
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            # One tool message per turn so far; parsing the JSON would cost more than the rest.
            turn = body.count(b'"role": "tool"') + body.count(b'"role":"tool"')
            reply = self.last if turn >= self.turns - 1 else self.replies[turn]
            asyncio.get_running_loop().call_later(self.latency_s, self._send, reply)

    def _send(self, reply: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(reply)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency", type=float, default=0.2)
    options = parser.parse_args()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Endpoint(options.turns, options.latency), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
