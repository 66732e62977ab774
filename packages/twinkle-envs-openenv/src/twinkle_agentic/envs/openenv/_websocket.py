"""A websocket that hands over whole messages by callback, and what its failures mean in words.

`websockets` does the handshake, proxies, TLS, keepalive and closing; only the path of a message is
shorter than its own `send` and `recv`, which cost a task switch each.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Any, Protocol, cast

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import Frame, Opcode
from websockets.protocol import State

from twinkle_agentic.envs.errors import CapacityError, EnvTimeoutError, SessionClosedError
from twinkle_agentic.envs.openenv._config import ConnectionConfig, ServerAddress

__all__ = ["WebSocket", "closed_error", "open_websocket"]

_DIRECT_BYTES = 8192  # far below the smallest send buffer of a connected socket
_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_TOKEN_WANTED = 401
_CLOSED_FOR_ROOM = (429, 503)  # what a load balancer in front of full servers answers


class _Listener(Protocol):
    """Gets what arrives on a websocket, on its event loop."""

    def on_message(self, frame: bytes) -> None:
        """Take a message."""
        ...

    def on_closed(self, reason: ConnectionClosed) -> None:
        """Learn that the connection has ended."""
        ...


class WebSocket(ClientConnection):
    """One connection, made by `open_websocket`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listener: _Listener | None = None
        self._early: list[bytes] = []
        self._parts: list[bytes] = []
        # Until `connection_lost`, after which the number may be that of another file.
        self._fd: int | None = None
        self._encrypted = False

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self.protocol.state is State.OPEN and not self.transport.is_closing()

    def listen(self, listener: _Listener) -> None:
        """Hand over what arrives, beginning with what has arrived already."""
        self._listener = listener
        early, self._early = self._early, []
        for message in early:
            listener.on_message(message)
        if self.protocol.state is State.CLOSED:
            listener.on_closed(self.protocol.close_exc)

    def send_now(self, message: bytes) -> bool:
        """Send a short text message from any thread, where that is safe; else return False.

        Safe is: a plain TCP socket with nothing waiting to be written, so that the whole frame goes
        into the kernel's buffer in one call, as the frames that the loop writes do. The listener
        calls this only until it was told that the connection has ended.
        """
        if self._fd is None or self._encrypted or len(message) > _DIRECT_BYTES:
            return False
        if self.transport.get_write_buffer_size():
            return False
        frame = Frame(Opcode.TEXT, message).serialize(mask=True)
        try:
            sent = os.write(self._fd, frame)
        except BlockingIOError:
            return False
        except OSError:  # the loop is about to learn that the connection has ended
            return True
        if sent < len(frame):
            # Next to impossible with so little to send: better to end it than to mix frames up.
            self.loop.call_soon_threadsafe(self.transport.abort)
        return True

    def send_on_loop(self, message: bytes) -> None:
        """Send any text message, without waiting for room in the buffer; nothing if closed."""
        if self.is_open:
            self.protocol.send_text(message)
            self.send_data()

    def cut(self) -> None:
        """End the connection at once; the listener hears no more of it."""
        self._listener = None
        if self._fd is None or self.transport.is_closing():
            return
        # A forked child may hold a copy of the descriptor; shutdown reaches the peer even so.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Keep the descriptor of the socket."""
        super().connection_made(transport)
        self._encrypted = transport.get_extra_info("ssl_object") is not None
        self._fd = transport.get_extra_info("socket").fileno()

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
        if self._listener is None:
            self._early.append(message)
        else:
            self._listener.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the listener that the connection has ended."""
        super().connection_lost(exc)
        if self._listener is not None:
            self._listener.on_closed(self.protocol.close_exc)
        self._fd = None


async def open_websocket(
    address: ServerAddress, config: ConnectionConfig, headers: Mapping[str, str]
) -> WebSocket:
    """Connect.

    Raises:
        EnvTimeoutError: No handshake within `connect_timeout_s`.
        CapacityError: The handshake was answered with HTTP 429 or 503.
        SessionClosedError: The server cannot be reached, or is no OpenEnv server.
    """
    try:
        websocket = await connect(
            address.websocket_url,
            open_timeout=config.connect_timeout_s,
            close_timeout=config.close_timeout_s,
            ping_interval=config.ping_interval_s,
            ping_timeout=config.ping_timeout_s,
            max_size=config.max_message_bytes,
            additional_headers=headers,
            proxy=cast("Any", config.proxy_for(address)),
            compression=None,
            create_connection=WebSocket,
        )
    except TimeoutError:
        raise EnvTimeoutError(
            f"no websocket handshake from {address.websocket_url} within "
            f"connect_timeout_s={config.connect_timeout_s:g}: the server is overloaded or "
            "not there"
        ) from None
    except InvalidStatus as error:
        status = error.response.status_code
        kind = CapacityError if status in _CLOSED_FOR_ROOM else SessionClosedError
        what_to_do = (
            "give the server's token, OpenEnvClient(token=...) or OPENENV_TOKEN"
            if status == _TOKEN_WANTED
            else "check that base_url is an OpenEnv server and that a proxy in between passes "
            "websockets"
        )
        raise kind(
            f"{address.websocket_url} answered the websocket handshake with HTTP {status}: "
            f"{what_to_do}"
        ) from error
    except (OSError, InvalidHandshake, InvalidURI, ImportError) as error:
        raise SessionClosedError(
            f"cannot connect to {address.websocket_url}: {error or type(error).__name__}: "
            "is the server running there?"
        ) from error
    return cast("WebSocket", websocket)


def closed_error(error: ConnectionClosed, config: ConnectionConfig) -> SessionClosedError:
    """Say in words why a connection ended, and which limit it met."""
    got, sent = error.rcvd, error.sent
    if sent is not None and sent.code == 1009 and not error.rcvd_then_sent:
        return SessionClosedError(
            f"the server's answer is larger than max_message_bytes={config.max_message_bytes}: "
            "the session was closed; raise max_message_bytes or make the environment say less"
        )
    if got is not None and got.code == 1009:
        return SessionClosedError(
            "the server closed the session because the message was too large for it "
            f"({got.reason or 'code 1009'}): raise uvicorn's ws_max_size, or lower "
            "max_action_bytes so that it is refused before it is sent"
        )
    if sent is not None and sent.code == 1011 and not error.rcvd_then_sent:
        return SessionClosedError(
            f"the server answered no keepalive ping for ping_timeout_s={config.ping_timeout_s}: "
            "it is dead or blocked, and the session was closed"
        )
    if got is None:
        return SessionClosedError(
            "the connection to the server broke without a close frame: the server died or the "
            "network failed"
        )
    reason = f" ({got.reason})" if got.reason else ""
    exits = "; an environment that calls sys.exit ends its session this way"
    hint = exits if got.code == 1000 else ""
    return SessionClosedError(f"the server closed the session with code {got.code}{reason}{hint}")
