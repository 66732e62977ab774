"""One session on a server: connect, start episodes, ask one thing at a time, close.

All sessions of the process live on the shared background loop; every coroutine here runs there.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from twinkle_agentic._aio.mailbox import Mailbox, mailbox_of
from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvTimeoutError,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv._servers import Servers
from twinkle_agentic.envs.openenv.link import Exchange, Link, lost_error
from twinkle_agentic.envs.openenv.protocol import MessageType

__all__ = ["Session", "backoff_delays"]

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
_LOOK_S = 0.5  # a signal that arrives on the way into an endless wait would never be acted on
_STUCK_S = 5.0  # beyond the limit that the background loop enforces itself


class Session:
    """What one client holds on a server.

    After anything that leaves the state of the server-side environment unknown, every request fails
    with `SessionClosedError` until `start` opens a new connection.

    Args:
        servers: Where a session may be.
        capacity_timeout_s: Seconds to wait for a free session; 0 takes the first refusal.
    """

    def __init__(self, servers: Servers, *, capacity_timeout_s: float) -> None:
        self.servers = servers
        self.capacity_timeout_s = capacity_timeout_s
        self.loop = asyncio.get_running_loop()
        self._on_the_way: deque[Exchange] = deque()
        self._mailbox = mailbox_of(self.loop)
        self._lock = asyncio.Lock()
        self._link: Link | None = None
        self._closings = 0
        self._why_none = "no episode has been started: call reset first"

    async def start(self, kind: MessageType, frame: bytes, *, timeout_s: float) -> dict[str, Any]:
        """Send a message that needs no earlier one, over the open connection or a new one.

        Waits for room on a full server, with growing random delays, up to `capacity_timeout_s`.

        Raises:
            CapacityError: The server stayed full.
            SessionClosedError: `close` was called meanwhile, among other reasons.
            TwinkleEnvError: Connecting failed, or what became of the message.
        """
        closings = self._closings
        async with self._lock:
            link = self._link
            if link is not None and link.failure is None:
                try:
                    return await self.request(kind, frame, timeout_s=timeout_s)
                except SessionClosedError:
                    # An idle connection had died unnoticed, as after a server's restart. A reset
                    # starts from nothing, so it may as well do so on a new connection.
                    if link.uses == 0:
                        raise
            return await self._start_anew(kind, frame, timeout_s, closings)

    async def request(self, kind: MessageType, frame: bytes, *, timeout_s: float) -> dict[str, Any]:
        """Send one message of the running episode and wait for its answer; requests queue in order.

        This coroutine may run on any event loop.

        Raises:
            SessionClosedError: There is no session (any more); its text has the original reason.
            TwinkleEnvError: What became of this message.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any]] = loop.create_future()
        if loop is self.loop:
            exchange = Exchange(kind, frame, timeout_s, partial(_resolve, future))
            self.submit(exchange)
        else:
            exchange = Exchange(
                kind, frame, timeout_s, partial(_resolve_in, mailbox_of(loop), future)
            )
        try:
            if loop is not self.loop:
                self._hand_over(exchange)
            return await future
        except asyncio.CancelledError:
            self._mailbox.post(self.cancel, exchange)
            raise

    def request_sync(self, kind: MessageType, frame: bytes, *, timeout_s: float) -> dict[str, Any]:
        """Send one message and block the calling thread until its answer is there; as `request`.

        Raises:
            RuntimeError: Called on the background loop itself, where it would wait for ever.
            EnvTimeoutError: No answer in time; also where the background thread is stuck and cannot
                say so itself.
        """
        if asyncio._get_running_loop() is self.loop:  # pyright: ignore[reportPrivateUsage]
            raise RuntimeError(
                "a sync method was called on the background loop: await its async twin"
            )
        answered = _thread.allocate_lock()
        answered.acquire()
        outcome: list[Any] = []

        def deliver(answer: dict[str, Any] | None, error: TwinkleEnvError | None) -> None:
            outcome[:] = (answer, error)
            answered.release()

        exchange = Exchange(kind, frame, timeout_s, deliver)
        try:
            self._hand_over(exchange)
            if not answered.acquire(timeout=_LOOK_S):
                self._wait_on(exchange, answered)
        except BaseException:  # Ctrl-C
            with contextlib.suppress(RuntimeError):  # the loop is gone, and the session with it
                self._mailbox.post(self.cancel, exchange)
            raise
        answer, error = outcome
        if error is not None:
            raise error
        return answer

    def _wait_on(self, exchange: Exchange, answered: _thread.LockType) -> None:
        """Wait for an answer that takes longer, each message before it included."""
        link = self._link
        turns = 1 + len(self._on_the_way) + (0 if link is None else link.num_waiting)
        deadline = time.monotonic() + turns * exchange.timeout_s + _STUCK_S
        while not answered.acquire(timeout=_LOOK_S):
            if time.monotonic() > deadline:
                stuck = EnvTimeoutError(
                    f"no answer to {exchange.kind} within {exchange.timeout_s:g} s, and the "
                    "background thread does not end the session: something blocks it; never call "
                    "blocking code on the background loop"
                )
                if link is not None:
                    link.give_up(stuck)
                raise stuck

    def _hand_over(self, exchange: Exchange) -> None:
        """Send from the caller's own thread where nothing is before it, else by way of the loop."""
        link = self._link
        if link is None or self._on_the_way or not link.submit_from_thread(exchange):
            self._on_the_way.append(exchange)
            self._mailbox.post(self._arrive)

    def _arrive(self) -> None:
        while self._on_the_way:  # one that an interrupt left behind included
            self.submit(self._on_the_way.popleft())

    def submit(self, exchange: Exchange) -> None:
        """Hand a message to the link; on the background loop."""
        if exchange.cancelled:
            return
        link = self._link
        if link is None:
            exchange.deliver(None, SessionClosedError(self._why_none))
        elif link.failure is not None:
            exchange.deliver(None, lost_error(link.failure))
        else:
            link.submit(exchange)

    def cancel(self, exchange: Exchange) -> None:
        """Take back a message; on the background loop."""
        exchange.cancelled = True
        if self._link is not None:
            self._link.cancel(exchange)

    @property
    def is_open(self) -> bool:
        """Whether a request could be sent."""
        return self._link is not None and self._link.failure is None

    async def close(self) -> None:
        """End the session within `close_timeout_s`; a message in flight fails at once."""
        link, self._link = self._link, None
        self._closings += 1  # ends a `start` on its way, too
        self._why_none = "the client is closed: call reset for a new session"
        if link is not None:
            await link.close(SessionClosedError("the client was closed"))

    def drop(self) -> None:
        """Close from any thread without waiting; for clients that nobody holds any more."""
        with contextlib.suppress(RuntimeError):  # the loop is gone, and its sockets with it
            self.loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        if self._link is not None:
            task = self.loop.create_task(self.close())
            _closing.add(task)
            task.add_done_callback(_closing.discard)

    async def _start_anew(
        self, kind: MessageType, frame: bytes, timeout_s: float, closings: int
    ) -> dict[str, Any]:
        deadline = self.loop.time() + self.capacity_timeout_s
        for delay in backoff_delays():
            self._check_wanted(closings)
            try:
                # Time in the server's queue is time without an answer.
                wait_s = min(deadline - self.loop.time(), timeout_s / 2)
                link = await self.servers.open(wait_s=wait_s)
                if self._closings != closings:
                    await link.close(SessionClosedError("the client was closed"))
                self._check_wanted(closings)
                self._link = link
                if link.failure is not None:
                    raise link.failure
                return await self.request(kind, frame, timeout_s=timeout_s)
            except CapacityError as full:
                self.servers.refused()
                left = deadline - self.loop.time()
                if left <= 0:
                    raise CapacityError(
                        f"no free session on {self.servers.where} within "
                        f"capacity_timeout_s={self.capacity_timeout_s:g} ({full}): run fewer "
                        "episodes at once, raise capacity_timeout_s, or give the server more room "
                        "(max_concurrent_envs, workers)"
                    ) from full
            await asyncio.sleep(min(delay, max(left, 0.0)))
        raise AssertionError("backoff_delays never ends")

    def _check_wanted(self, closings: int) -> None:
        if self._closings != closings:
            raise SessionClosedError("the client was closed while it connected to the server")


def backoff_delays(
    first_s: float = _FIRST_DELAY_S, longest_s: float = _LONGEST_DELAY_S
) -> Iterator[float]:
    """Yield random delays (s) without end; their bound doubles from `first_s` to `longest_s`."""
    bound = first_s
    while True:
        yield random.uniform(bound / 2, bound)
        bound = min(bound * 2, longest_s)


def _resolve(
    future: asyncio.Future[dict[str, Any]],
    answer: dict[str, Any] | None,
    error: TwinkleEnvError | None,
) -> None:
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer or {})


def _resolve_in(
    caller: Mailbox,
    future: asyncio.Future[dict[str, Any]],
    answer: dict[str, Any] | None,
    error: TwinkleEnvError | None,
) -> None:
    with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
        caller.post(_resolve, future, answer, error)


_closing: set[asyncio.Task[None]] = set()
