"""A websocket that hands over whole messages by callback.

`websockets` does the handshake, proxies, TLS, keepalive and closing; only the path of a message is
shorter than its own `send` and `recv`, which cost a task switch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State

__all__ = ["Wire"]

_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)


class Wire(ClientConnection):
    """One connection; made by `websockets.asyncio.client.connect(create_connection=Wire)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_message: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[ConnectionClosed], None] | None = None
        self._early: list[bytes] = []
        self._parts: list[bytes] = []
        self._lost: ConnectionClosed | None = None

    def listen(
        self, on_message: Callable[[bytes], None], on_lost: Callable[[ConnectionClosed], None]
    ) -> None:
        """Name who is told; what came before is told at once."""
        self._on_message, self._on_lost = on_message, on_lost
        early, self._early = self._early, []
        for message in early:
            on_message(message)
        if self._lost is not None:
            on_lost(self._lost)

    def write(self, message: bytes) -> None:
        """Send a text message, without waiting for room in the buffer; nothing if closed."""
        if self.protocol.state is State.OPEN and not self.transport.is_closing():
            self.protocol.send_text(message)
            self.send_data()

    def process_event(self, event: Any) -> None:
        """Take a frame from the connection."""
        if self.response is None or not isinstance(event, Frame) or event.opcode not in _DATA:
            super().process_event(event)
            return
        if not event.fin:
            self._parts.append(bytes(event.data))
            return
        message = bytes(event.data)
        if self._parts:
            message = b"".join([*self._parts, message])
            self._parts = []
        if self._on_message is None:
            self._early.append(message)
        else:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Learn that the connection is gone."""
        super().connection_lost(exc)
        self._lost = self.protocol.close_exc
        if self._on_lost is not None:
            self._on_lost(self._lost)
