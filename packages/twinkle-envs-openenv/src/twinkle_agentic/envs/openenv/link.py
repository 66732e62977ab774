"""One websocket connection: at most one message in flight, its answer, and why it ended.

A `Link` lives on one event loop. It never reconnects and never guesses: whatever leaves the order
of answers unknown ends it, and `failure` keeps the reason.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from websockets.asyncio.client import connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)

from twinkle_agentic.envs.background import background_loop
from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvTimeoutError,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv.address import ServerAddress
from twinkle_agentic.envs.openenv.protocol import (
    CLOSE_MESSAGE,
    MessageType,
    decode,
    unsolicited,
)
from twinkle_agentic.envs.openenv.wire import Wire

__all__ = ["Exchange", "Link", "LinkSettings", "lost_error"]

_CLOSED_FOR_ROOM = (429, 503)  # what a load balancer in front of full servers answers
_EXIT_GRACE_S = 2.0  # all links together, when the interpreter exits


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How to reach a server, and what to bear with.

    Attributes:
        address: The server.
        connect_timeout_s: Seconds for TCP, TLS and the websocket handshake together.
        close_timeout_s: Seconds for a polite close; then the connection is cut.
        ping_interval_s: Seconds between keepalive pings; `None` sends none.
        ping_timeout_s: Seconds without a pong after which the server counts as dead; `None` waits
            for ever.
        max_message_bytes: Largest frame taken from the server.
        headers: Extra HTTP headers of the handshake.
        proxy: `True` asks the environment (`HTTP_PROXY` and the like) unless the server is on this
            machine, `None` goes straight, a URL goes through that proxy.
    """

    address: ServerAddress
    connect_timeout_s: float = 10.0
    close_timeout_s: float = 5.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 120.0
    max_message_bytes: int = 100 * 2**20
    headers: Mapping[str, str] | None = None
    proxy: str | bool | None = True


@dataclass(slots=True, eq=False)
class Exchange:
    """One message and where its answer goes.

    Attributes:
        kind: What is asked.
        frame: The message.
        timeout_s: Seconds from sending to the answer.
        deliver: Called once, on the link's loop, with the answer's data or with the reason why
            there is none.
        cancelled: Nobody waits any more.
    """

    kind: MessageType
    frame: bytes
    timeout_s: float
    deliver: Callable[[dict[str, Any] | None, TwinkleEnvError | None], None]
    cancelled: bool = False


class Link:
    """One open connection, with one message in flight at a time; made by `Link.open`.

    Attributes:
        failure: Why the link is of no use any more; `None` while it works.
        uses: Messages answered so far.
    """

    def __init__(self, wire: Wire, settings: LinkSettings) -> None:
        self.failure: TwinkleEnvError | None = None
        self.uses = 0
        self.loop = asyncio.get_running_loop()
        self._wire = wire
        self._settings = settings
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # Guards the fields above: a message may be sent from the caller's own thread.
        self._guard = threading.Lock()
        _open_links.add(self)
        wire.listen(self._on_message, self._on_lost)

    @classmethod
    async def open(cls, settings: LinkSettings) -> Link:
        """Connect.

        Raises:
            EnvTimeoutError: No handshake within `connect_timeout_s`.
            CapacityError: The handshake was answered with HTTP 429 or 503.
            SessionClosedError: The server cannot be reached, or is no OpenEnv server.
        """
        address = settings.address
        proxy = settings.proxy
        if proxy is False or (proxy is True and address.is_loopback):
            proxy = None
        try:
            wire = await connect(
                address.websocket_url,
                open_timeout=settings.connect_timeout_s,
                close_timeout=settings.close_timeout_s,
                ping_interval=settings.ping_interval_s,
                ping_timeout=settings.ping_timeout_s,
                max_size=settings.max_message_bytes,
                additional_headers=settings.headers,
                proxy=proxy,
                compression=None,
                create_connection=Wire,
            )
        except TimeoutError:
            raise EnvTimeoutError(
                f"no websocket handshake from {address.websocket_url} within "
                f"connect_timeout_s={settings.connect_timeout_s:g}: the server is overloaded or "
                "not there"
            ) from None
        except InvalidStatus as error:
            status = error.response.status_code
            kind = CapacityError if status in _CLOSED_FOR_ROOM else SessionClosedError
            raise kind(
                f"{address.websocket_url} answered the websocket handshake with HTTP {status}: "
                "check that base_url is an OpenEnv server and that a proxy in between passes "
                "websockets"
            ) from error
        except (OSError, InvalidHandshake, InvalidURI, ImportError) as error:
            raise SessionClosedError(
                f"cannot connect to {address.websocket_url}: {error or type(error).__name__}: "
                "is the server running there?"
            ) from error
        return cls(cast("Wire", wire), settings)

    def submit(self, exchange: Exchange) -> None:
        """Send a message, now or when those before it are answered."""
        with self._guard:
            failure = self.failure
            if failure is None:
                if self._current is not None:
                    self._queue.append(exchange)
                else:
                    self._send(exchange)
        if failure is not None:
            exchange.deliver(None, failure)

    def submit_from_thread(self, exchange: Exchange) -> bool:
        """Send a message from any thread without waking the loop, where nothing stands in the way.

        Returns:
            Whether it was sent; if not, it must be submitted on the loop.
        """
        with self._guard:
            timer = self._timer
            deadline = time.monotonic() + exchange.timeout_s
            if (
                self.failure is not None
                or self._current is not None
                or self._queue
                or timer is None  # only the loop can start one
                or timer.when() > deadline
            ):
                return False
            if not self._wire.write_from_thread(exchange.frame):
                return False
            self._deadline = deadline
            self._current = exchange
            return True

    def cancel(self, exchange: Exchange) -> None:
        """Take back a message; one that was sent leaves the state unknown and ends the link."""
        with self._guard:
            due = exchange is self._current
            if due:
                self._current = None
            elif exchange in self._queue:
                self._queue.remove(exchange)
        if due:
            self.fail(
                SessionClosedError(
                    f"a {exchange.kind} was cancelled while its answer was due: the session was "
                    "closed"
                )
            )

    @property
    def num_waiting(self) -> int:
        """Messages that wait for the one in flight."""
        return len(self._queue)

    def give_up(self, reason: TwinkleEnvError) -> None:
        """End the link from any thread, as `fail` does as soon as its loop gets to it."""
        with self._guard:
            self.failure = self.failure or reason
        with contextlib.suppress(RuntimeError):  # the loop is gone, and the socket with it
            self.loop.call_soon_threadsafe(self.fail, reason)

    def fail(self, reason: TwinkleEnvError) -> None:
        """End the link at once: the message in flight fails with `reason`, the socket is cut."""
        with self._guard:
            failure = self.failure = self.failure or reason
            current, self._current = self._current, None
            waiting, self._queue = self._queue, deque()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._cut()
        if current is not None:
            current.deliver(None, failure)
        for exchange in waiting:
            exchange.deliver(None, lost_error(failure))

    async def close(self, reason: TwinkleEnvError) -> None:
        """End the link politely: the server has `close_timeout_s` to let the session go.

        A message in flight is not waited for: then the socket is cut.
        """
        with self._guard:
            idle = self.failure is None and self._current is None
            if idle:
                self.failure = reason
        if not idle:
            self.fail(reason)
            return
        try:
            async with asyncio.timeout(self._settings.close_timeout_s):
                self._wire.write(CLOSE_MESSAGE)
                # The server closes the connection once the environment is closed and its slot free.
                await self._wire.wait_closed()
        except TimeoutError:
            pass
        finally:
            self.fail(reason)

    def _send(self, exchange: Exchange) -> None:
        self._current = exchange
        self._deadline = self.loop.time() + exchange.timeout_s
        timer = self._timer
        if timer is None or timer.when() > self._deadline:
            if timer is not None:
                timer.cancel()
            self._timer = self.loop.call_at(self._deadline, self._check)
        self._wire.write(exchange.frame)

    def _on_message(self, message: bytes) -> None:
        with self._guard:
            exchange, self._current = self._current, None
        if exchange is None:
            if self.failure is None:
                self.fail(unsolicited(message))
            return
        self.uses += 1
        try:
            answer = decode(message, exchange.kind)
        except TwinkleEnvError as error:
            if not _session_lives(error):
                self.fail(error)
            exchange.deliver(None, error)
        else:
            exchange.deliver(answer, None)
        if self._queue:
            with self._guard:
                if self._queue and self._current is None and self.failure is None:
                    self._send(self._queue.popleft())

    def _on_lost(self, error: ConnectionClosed) -> None:
        _open_links.discard(self)
        self.fail(_closed(error, self._settings))

    def _check(self) -> None:
        """Look whether the message in flight is overdue; one timer serves all messages in turn."""
        with self._guard:
            self._timer = None
            exchange = self._current
            if exchange is None:
                return
            if self.loop.time() < self._deadline:
                self._timer = self.loop.call_at(self._deadline, self._check)
                return
        self.fail(
            EnvTimeoutError(
                f"no answer to {exchange.kind} within {exchange.timeout_s:g} s: the session was "
                "closed, for its state is unknown; raise message_timeout_s if the environment "
                "takes longer"
            )
        )

    def _cut(self) -> None:
        transport = self._wire.transport
        if transport.is_closing():
            return
        raw = transport.get_extra_info("socket")
        if raw is not None:
            # A forked child may hold a copy of the descriptor; shutdown reaches the peer even so.
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_RDWR)
        transport.abort()


def lost_error(failure: TwinkleEnvError) -> SessionClosedError:
    """Make the error of every message after the one that met the failure."""
    return SessionClosedError(f"the session is lost, call reset: {failure}")


def _session_lives(error: TwinkleEnvError) -> bool:
    return getattr(error, "session_lives", False) or not isinstance(
        error, (SessionClosedError, CapacityError, RuntimeError)
    )


def _closed(error: ConnectionClosed, settings: LinkSettings) -> SessionClosedError:
    """Say in words why a connection ended."""
    got, sent = error.rcvd, error.sent
    if sent is not None and sent.code == 1009 and not error.rcvd_then_sent:
        return SessionClosedError(
            f"the server's answer is larger than max_message_bytes={settings.max_message_bytes}: "
            "the session was closed; raise max_message_bytes or make the environment say less"
        )
    if got is not None and got.code == 1009:
        return SessionClosedError(
            "the server closed the session because the message was too large for it "
            f"({got.reason or 'code 1009'}): raise uvicorn's ws_max_size, or lower "
            "max_action_bytes to be told before sending"
        )
    if sent is not None and sent.code == 1011 and not error.rcvd_then_sent:
        return SessionClosedError(
            f"the server answered no keepalive ping for ping_timeout_s={settings.ping_timeout_s}: "
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


# Strong references: an open link must not be collected before it was closed.
_open_links: set[Link] = set()


async def _close_all(links: list[Link]) -> None:
    reason = SessionClosedError("the interpreter is exiting")
    await asyncio.wait([asyncio.ensure_future(link.close(reason)) for link in links])


def _close_at_exit() -> None:
    loop = background_loop()
    links = [link for link in _open_links if link.loop is loop]
    if links:
        work = asyncio.run_coroutine_threadsafe(_close_all(links), loop)
        with contextlib.suppress(Exception):
            work.result(_EXIT_GRACE_S)


def _forget_after_fork() -> None:
    # The connections are the parent's. They are kept alive unseen, for collecting a transport in
    # the child would take the parent's socket out of the event queue they share.
    global _open_links
    _inherited.append(_open_links)
    _open_links = set()


_inherited: list[set[Link]] = []

atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
