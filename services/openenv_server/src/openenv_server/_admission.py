"""Admission: how many sessions at a time, who waits, who is next.

A free slot goes to the waiting client that holds the fewest sessions, and among equals to the one
that got its last session longest ago: a client with 500 connections does not keep out one that
wants a single session. One `AdmissionQueue` belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = [
    "Admission",
    "AdmissionQueue",
    "AdmissionStatus",
    "Reason",
    "RefusedError",
    "SessionPermit",
]

Reason = Literal["full", "queue_full", "queue_timeout", "draining", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStatus:
    """The answer of `GET /capacity`.

    Attributes:
        sessions: Sessions that hold a slot.
        limit: Slots.
        queue: Clients that wait.
        max_queue: Clients that may wait.
        draining: No new sessions are taken.
    """

    sessions: int
    limit: int
    queue: int
    max_queue: int
    draining: bool

    @property
    def free(self) -> int:
        """Sessions that would be admitted at once."""
        return 0 if self.draining else max(0, self.limit - self.sessions - self.queue)


class RefusedError(Exception):
    """A client got no session; the message says what to do."""

    def __init__(self, reason: Reason, status: AdmissionStatus, waited_s: float = 0.0) -> None:
        super().__init__(_refusal(reason, status, waited_s))
        self.reason: Reason = reason
        self.status = status


class SessionPermit:
    """The right to one session; `release` gives it back, and may be called twice."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Free the slot."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Admission(Protocol):
    """What the application asks: an `AdmissionQueue`, here or in the supervising process."""

    async def enter(self, client: str, *, wait_s: float | None = None) -> SessionPermit:
        """Wait for a slot; see `AdmissionQueue.enter`."""
        ...

    async def status(self) -> AdmissionStatus:
        """Return the numbers of the whole server."""
        ...


@dataclass(eq=False, slots=True)
class _Waiter:
    client: str
    future: asyncio.Future[SessionPermit]


class AdmissionQueue:
    """Slots and the queue for them.

    Args:
        limit: Sessions at a time.
        max_queue: Clients that may wait.
        queue_timeout_s: Seconds one waits at most.
    """

    def __init__(self, *, limit: int, max_queue: int, queue_timeout_s: float) -> None:
        self._limit = limit
        self._max_queue = max_queue
        self._queue_timeout_s = queue_timeout_s
        self._held: Counter[str] = Counter()
        self._admitted: dict[str, int] = {}  # when a client was let in last; by number
        self._count = 0
        self._sessions = 0
        self._waiting: list[_Waiter] = []  # in the order of arrival
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    def now(self) -> AdmissionStatus:
        """Return the numbers of this moment."""
        return AdmissionStatus(
            sessions=self._sessions,
            limit=self._limit,
            queue=len(self._waiting),
            max_queue=self._max_queue,
            draining=self._draining,
        )

    async def status(self) -> AdmissionStatus:
        """Return the numbers of this moment."""
        return self.now()

    async def enter(self, client: str, *, wait_s: float | None = None) -> SessionPermit:
        """Take a slot, waiting in the queue where there is none.

        Args:
            client: Who asks; slots are shared fairly between clients.
            wait_s: Seconds to wait at most, where that is less than the server's own limit.

        Raises:
            RefusedError: The queue is full, the wait was too long, or the server drains.
        """
        if self._draining:
            raise RefusedError("draining", self.now())
        if self._sessions < self._limit and not self._waiting:
            return self._admit(client)
        limit_s = self._queue_timeout_s if wait_s is None else min(wait_s, self._queue_timeout_s)
        if limit_s <= 0 or self._max_queue == 0:
            raise RefusedError("full", self.now())
        if len(self._waiting) >= self._max_queue:
            raise RefusedError("queue_full", self.now())
        waiter = _Waiter(client, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        taken = False
        try:
            async with asyncio.timeout(limit_s):
                permit = await waiter.future
                taken = True
                return permit
        except TimeoutError:
            raise RefusedError("queue_timeout", self.now(), limit_s) from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._forget(client)
            done = waiter.future.done() and not waiter.future.cancelled()
            if not taken and done and waiter.future.exception() is None:
                # Admitted at the moment the wait ended: the next one gets the slot.
                waiter.future.result().release()

    def drain(self) -> None:
        """Take no new sessions, and refuse those that wait."""
        self._draining = True
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.future.done():
                waiter.future.set_exception(RefusedError("draining", self.now()))

    async def wait_empty(self) -> None:
        """Wait until no session holds a slot."""
        await self._empty.wait()

    def _admit(self, client: str) -> SessionPermit:
        self._sessions += 1
        self._held[client] += 1
        self._count += 1
        self._admitted[client] = self._count
        self._empty.clear()
        return SessionPermit(lambda: self._give_back(client))

    def _forget(self, client: str) -> None:
        if client not in self._held and all(each.client != client for each in self._waiting):
            self._admitted.pop(client, None)

    def _share(self, waiter: _Waiter) -> tuple[int, int]:
        client = waiter.client
        return self._held[client], self._admitted.get(client, 0)

    def _give_back(self, client: str) -> None:
        self._sessions -= 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._forget(client)
        if not self._sessions:
            self._empty.set()
        while self._waiting and self._sessions < self._limit:
            chosen = min(self._waiting, key=self._share)
            self._waiting.remove(chosen)
            if not chosen.future.done():
                chosen.future.set_result(self._admit(chosen.client))


def _refusal(reason: Reason, status: AdmissionStatus, waited_s: float) -> str:
    full = f"the server is full: {status.sessions} of {status.limit} sessions are in use"
    retry = "try again, close sessions that are idle, or raise --max-concurrent-envs"
    match reason:
        case "full":
            return f"{full}: {retry}"
        case "queue_full":
            return f"{full} and {status.queue} clients wait (--max-queue): {retry}"
        case "queue_timeout":
            return f"{full} and none became free in {waited_s:g} s (--queue-timeout-s): {retry}"
        case "draining":
            return "the server is shutting down and takes no new session: use another server"
        case "lost":
            return "the server's main process has ended: use another server"
