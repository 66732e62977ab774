"""The host's end of the connection to one supervisor."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any

from twinkle_isolation._wire import FrameBuffer, FrameError, encode
from twinkle_isolation.errors import GuestError, SandboxLostError

__all__ = ["Call", "Channel", "Event"]

_HIGH_WATER_BYTES = 4 << 20
_LOW_WATER_BYTES = 1 << 20
_EVENT_BYTES = 200  # what one queued event costs beside its body

Event = tuple[dict[str, Any], bytes]


class Call:
    """One request and the events that answer it, in order.

    What arrives faster than it is read is bounded: past 4 MiB the supervisor is told to hold this
    one request. A detached call drops its data, so that a program nobody listens to never blocks.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self.number = number
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._held = False
        self._detached = False
        self._final = False
        self._waiter: asyncio.Future[None] | None = None

    def detach(self) -> None:
        """Drop the data from now on; the events that end the call are kept."""
        self._detached = True
        kept = [event for event in self._events if event[0].get("ev") != "data"]
        self._events = deque(kept)
        self._bytes = 0
        self._release()

    def attach(self) -> None:
        """Keep the data again."""
        self._detached = False

    def put(self, event: Event) -> None:
        message, body = event
        kind = message.get("ev")
        if kind in ("result", "error", "end"):
            self._final = True
            self._channel.forget(self.number)
        if self._detached and kind == "data":
            return
        self._events.append(event)
        self._bytes += len(body) + _EVENT_BYTES
        if self._bytes > _HIGH_WATER_BYTES and not self._held and not self._final:
            self._held = True
            self._channel.send({"op": "flow", "target": self.number, "stop": True})
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Event:
        """Return the next event.

        Raises:
            SandboxLostError: The connection ended before the call did.
            GuestError: The sandbox answered that it cannot.
        """
        while not self._events:
            if self._channel.closed and not self._final:
                raise SandboxLostError(f"the sandbox has ended: {self._channel.reason}")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message, body = self._events.popleft()
        self._bytes -= len(body) + _EVENT_BYTES
        if self._bytes < _LOW_WATER_BYTES:
            self._release()
        if message.get("ev") == "error":
            raise GuestError(message.get("code", "internal"), str(message.get("message")))
        return message, body

    async def result(self) -> dict[str, Any]:
        """Return the value of the `result` event; any other breaks the protocol."""
        message, _ = await self.next()
        if message.get("ev") != "result":
            raise FrameError(f"expected a result, got {message.get('ev')!r}")
        value: dict[str, Any] = message["value"]
        return value

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._channel.send({"op": "flow", "target": self.number, "stop": False})

    def lost(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channel(asyncio.Protocol):
    """Multiplex the requests of one sandbox over its socket. Belongs to one event loop."""

    def __init__(self) -> None:
        self._frames = FrameBuffer()
        self._calls: dict[int, Call] = {}
        self._next = 1
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.closed = False
        self.reason = "not connected"
        self.ended = asyncio.Event()

    @classmethod
    async def open(cls, sock: socket.socket) -> Channel:
        """Take over `sock`."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(cls, sock=sock)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.reason = ""

    def data_received(self, data: bytes) -> None:
        try:
            for message, body in self._frames.feed(data):
                call = self._calls.get(message.get("id", 0))
                if call is not None:
                    call.put((message, body))
        except (FrameError, TypeError) as error:
            self.close(f"the supervisor broke the protocol: {error}")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.reason = self.reason or (f"{exc}" if exc else "the supervisor is gone")
        self._writable.set()
        for call in list(self._calls.values()):
            call.lost()
        self.ended.set()

    def close(self, reason: str) -> None:
        """Close the connection; everything that waits on it raises `SandboxLostError`."""
        self.reason = self.reason or reason
        if self._transport is not None:
            self._transport.abort()
        self.closed = True

    def send(self, message: dict[str, Any], body: bytes = b"") -> None:
        """Send one frame now (the transport buffers it); nothing happens on a closed connection."""
        if self._transport is not None and not self.closed:
            self._transport.write(encode(message, body))

    async def drain(self) -> None:
        """Wait until the transport's buffer has room."""
        await self._writable.wait()

    def call(self, op: str, body: bytes = b"", /, **arguments: Any) -> Call:
        """Start a request.

        Raises:
            SandboxLostError: The sandbox has ended.
        """
        if self.closed:
            raise SandboxLostError(f"the sandbox has ended: {self.reason}")
        number = self._next
        self._next += 1
        call = self._calls[number] = Call(self, number)
        self.send({"op": op, "id": number, **arguments}, body)
        return call

    def forget(self, number: int) -> None:
        """Drop what is known of a call that is over or that nobody waits for."""
        self._calls.pop(number, None)
