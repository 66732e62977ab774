"""A websocket that hands over whole messages by callback.

`websockets` does the handshake, proxies, TLS, keepalive and closing; only the path of a message is
shorter than its own `send` and `recv`, which cost a task switch each.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import State

__all__ = ["Wire"]

_DIRECT_BYTES = 8192  # far below the smallest send buffer of a connected socket
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
        self._raw_socket: socket.socket | None = None

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

    def write_from_thread(self, message: bytes) -> bool:
        """Send a short text message from any thread, at once, where that is safe.

        Safe is: a plain TCP socket with nothing waiting to be written, so that the whole frame goes
        into the kernel's buffer in one call, as the frames that the loop writes do.

        Returns:
            Whether it was sent.
        """
        raw = self._raw_socket
        if raw is None or len(message) > _DIRECT_BYTES or self.transport.get_write_buffer_size():
            return False
        frame = Frame(Opcode.TEXT, message).serialize(mask=True)
        try:
            sent = raw.send(frame)
        except BlockingIOError:
            return False
        except OSError:  # the loop is about to learn that the connection is gone
            return True
        if sent < len(frame):
            # Next to impossible with so little to send: better to end it than to mix frames up.
            self.loop.call_soon_threadsafe(self.transport.abort)
        return True

    def connection_made(self, transport: Any) -> None:
        """Learn that the connection is there."""
        super().connection_made(transport)
        if transport.get_extra_info("ssl_object") is None:
            self._raw_socket = getattr(transport.get_extra_info("socket"), "_sock", None)

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
