"""The host's end of the connection to one supervisor."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from twinkle_isolation._wire import FrameBuffer, FrameError, encode
from twinkle_isolation.errors import GuestError, SandboxLostError

__all__ = ["Call", "Channel", "Event"]

_HIGH_WATER_BYTES = 4 << 20
_LOW_WATER_BYTES = 1 << 20
_EVENT_BYTES = 200  # what one queued event costs beside its body

Event = tuple[dict[str, Any], bytes]
_T = TypeVar("_T")


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

    @property
    def ended(self) -> bool:
        """The last event of the call has arrived."""
        return self._final

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

    async def next(self, *expected: str) -> Event:
        """Return the next event, which is one of the `expected` kinds.

        Raises:
            SandboxLostError: The connection ended before the call did, or the answer is none.
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
        if message.get("ev") not in expected:
            raise self.broken(f"expected {expected}, got {message.get('ev')!r}")
        return message, body

    async def begun(self, undo: Mapping[str, Any]) -> dict[str, Any]:
        """Return the start of what goes on then; who is cancelled before it gets nothing.

        Args:
            undo: The request that ends it.

        Raises:
            SandboxLostError: The connection ended before the call did, or the answer is none.
            GuestError: The sandbox answered that it cannot.
        """
        try:
            message, _ = await self.next("start")
        except asyncio.CancelledError:
            self.detach()
            self._channel.send({**undo, "id": 0})
            raise
        return message

    async def result(self) -> dict[str, Any]:
        """Return the value of the `result` event.

        Raises:
            SandboxLostError: The connection ended before the call did, or the answer is none.
            GuestError: The sandbox answered that it cannot.
        """
        message, _ = await self.next("result")
        return cast("dict[str, Any]", self.field(message, "value", dict))

    def field(self, message: dict[str, Any], name: str, kind: type[_T]) -> _T:
        """Return what an event holds under a name.

        Raises:
            SandboxLostError: It is not of that kind; the connection is closed.
        """
        value = message.get(name)
        if not isinstance(value, kind):
            raise self.broken(f"{name} is {value!r}, no {kind.__name__}")
        return value

    def made(self, kind: type[_T], value: object) -> _T:
        """Return a record from the values for it.

        Raises:
            SandboxLostError: They do not fit; the connection is closed.
        """
        try:
            return kind(**value)  # type: ignore[arg-type]
        except TypeError as error:
            raise self.broken(str(error)) from error

    def broken(self, what: str) -> SandboxLostError:
        """Close the connection to a supervisor that answers what it cannot mean."""
        self._channel.close(f"the supervisor broke the protocol: {what}")
        return SandboxLostError(f"the sandbox has ended: {self._channel.reason}")

    def _release(self) -> None:
        if self._held:
            self._held = False
            self._channel.send({"op": "flow", "target": self.number, "stop": False})

    def lost(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channel(asyncio.Protocol):
    """Multiplex the requests of one sandbox over its socket. Belongs to one event loop.

    While something waits for an answer, the supervisor has to say something in every
    `answer_timeout_s`; it is asked when it does not, and the connection is closed when it does not
    answer that.

    Attributes:
        on_lost: Called when the connection has ended.
    """

    def __init__(self, answer_timeout_s: float) -> None:
        self._check_s = answer_timeout_s / 2
        self._check_timer: asyncio.TimerHandle | None = None
        self._heard = False
        self._asked = False
        self.on_lost: Callable[[], None] = lambda: None
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
    async def open(cls, sock: socket.socket, *, answer_timeout_s: float) -> Channel:
        """Take over `sock`."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_connection(lambda: cls(answer_timeout_s), sock=sock)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # of uvloop: no subclass of it
        self.reason = ""

    def data_received(self, data: bytes) -> None:
        self._heard = True
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
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.on_lost()

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
            GuestError: `invalid_argument` when the request is too long.
        """
        if self.closed:
            raise SandboxLostError(f"the sandbox has ended: {self.reason}")
        number = self._next
        self._next += 1
        try:
            self.send({"op": op, "id": number, **arguments}, body)
        except FrameError as error:
            raise GuestError(
                "invalid_argument", f"the request {op!r} is too long: {error}"
            ) from error
        call = self._calls[number] = Call(self, number)
        if self._check_timer is None:
            self._check_later()
        return call

    def _check_later(self) -> None:
        self._heard = False
        loop = asyncio.get_running_loop()
        self._check_timer = loop.call_later(self._check_s, self._check)

    def _check(self) -> None:
        """See whether the supervisor lives, as long as anything is asked of it."""
        self._check_timer = None
        if self.closed or not self._calls:
            self._asked = False
        elif self._asked and not self._heard:
            self.close(f"its supervisor said nothing for {2 * self._check_s:g} s")
        else:
            self._asked = not self._heard
            if self._asked:
                self.send({"op": "ping", "id": 0})
            self._check_later()

    def forget(self, number: int) -> None:
        """Drop what is known of a call that is over or that nobody waits for."""
        self._calls.pop(number, None)
