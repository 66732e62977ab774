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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.exceptions import ConnectionClosed

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvTimeoutError,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv.connecting import closed_error, open_wire
from twinkle_agentic.envs.openenv.link_settings import LinkSettings
from twinkle_agentic.envs.openenv.protocol import (
    CLOSE_MESSAGE,
    MessageType,
    decode,
    unsolicited,
)
from twinkle_agentic.envs.openenv.wire import Wire

__all__ = ["Exchange", "Link", "lost_error"]

_EXIT_GRACE_S = 2.0  # all links together, when the interpreter exits


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
        return cls(await open_wire(settings), settings)

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
        self.fail(closed_error(error, self._settings))

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
