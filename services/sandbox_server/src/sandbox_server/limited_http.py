"""Limits of a connection, before any request is known: its header, its time, its number.

uvicorn bounds none of them, so that one peer without a key could fill the memory, the log and all
descriptors of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sandbox_server.auth import is_loopback

MAX_HEAD_BYTES = 64 << 10
"""Of request line and headers together; longer ones are answered with 400."""


@dataclass(slots=True)
class ConnectionLimits:
    """Limits of the connections of this process, set once before the server runs.

    Attributes:
        head_timeout_s: Seconds from the first byte of a request to the end of its headers, and for
            a new connection to its first byte.
        body_timeout_s: Seconds that the body of a request may make no progress.
        connections: At once.
        connections_per_peer: At once from one address; loopback is not counted.
    """

    head_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    connections: int = 16384
    connections_per_peer: int = 1024


limits = ConnectionLimits()  # of the process: uvicorn has no way to hand them to a protocol

_open: Counter[str] = Counter()
logger = logging.getLogger(__name__)


class LimitedProtocol(H11Protocol):
    """One HTTP connection within `limits`."""

    _peer: str | None = None
    _timer: asyncio.TimerHandle | None = None
    _heard_at: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the connection, or close it where there are too many."""
        super().connection_made(cast("Any", transport))
        address: Any = transport.get_extra_info("peername")
        peer = str(address[0]) if address else ""
        too_many = not is_loopback(peer) and _open[peer] >= limits.connections_per_peer
        if too_many or _open.total() >= limits.connections:
            logger.warning("a connection of %s was closed: there are too many", peer)
            cast("asyncio.Transport", transport).abort()
            return
        self._peer = peer
        _open[peer] += 1
        self._heard_at = time.monotonic()
        self._look_later(limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        if self._peer is not None:
            _open[self._peer] -= 1
            if not _open[self._peer]:
                del _open[self._peer]
            self._peer = None

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        if self.conn.their_state is h11.SEND_BODY or not self._has_begun():
            self._heard_at = time.monotonic()  # of a head, the first byte: it has its time once
        super().data_received(data)

    def _look(self) -> None:
        """Close the connection where its request makes no progress; look again later."""
        self._timer = None
        silent_s = time.monotonic() - self._heard_at
        in_body = self.conn.their_state is h11.SEND_BODY
        limit_s = limits.body_timeout_s if in_body else limits.head_timeout_s
        # uvicorn stops reading while the application is behind: then the peer is not at fault. And
        # between two requests its own keep-alive limit counts.
        cycle = cast("object", self.cycle)  # `None` until there was a request
        waits = not self.flow.read_paused if in_body else cycle is None or self._has_begun()
        if waits and silent_s >= limit_s:
            self.transport.abort()
        else:
            self._look_later(limit_s - silent_s if 0 < silent_s < limit_s else limit_s)

    def _look_later(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _has_begun(self) -> bool:
        """Tell whether a part of a request's head has come."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])


class OncePerSecond(logging.Filter):
    """Lets one line per logger and place through in a second, and counts the others.

    A peer must not be able to fill a disk with log lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one line."""
        place = (record.name, record.pathname, record.lineno)
        now = time.monotonic()
        last, dropped = self._last.get(place, (-1.0, 0))
        if now - last < 1.0:
            self._last[place] = (last, dropped + 1)
            return False
        self._last[place] = (now, 0)
        if dropped:
            record.msg = f"{record.getMessage()} (and {dropped} more like it)"
            record.args = ()
        return True
