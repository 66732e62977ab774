"""Which slots are free, and who waits for one: first come, first served."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic.envs.errors import ErrorKind, PoolError

__all__ = ["Leases"]


class Leases:
    """Hands out slots and takes them back. Thread-safe.

    Args:
        slots: All slots, in the order in which they are handed out first.
    """

    def __init__(self, slots: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._free = deque(slots)
        self._size = len(self._free)
        self._leased: set[int] = set()
        self._pinned: set[int] = set()
        self._waiting: deque[Future[int]] = deque()
        self._closed = False

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        """Callers that wait for a slot."""
        return len(self._waiting)

    def try_acquire(self) -> int | None:
        """Take a free slot, or `None` where there is none or others wait already."""
        with self._lock:
            self._check_open()
            return self._take() if self._free and not self._waiting else None

    def acquire(self, timeout_s: float) -> int:
        """Take a slot, waiting for one.

        Raises:
            PoolError: No slot within `timeout_s`, with `kind` `capacity`; or the pool is closed.
            ValueError: `timeout_s` is no limit; 0 does not wait.
        """
        check_limit("timeout_s", timeout_s, allow_zero=True)
        waiter = self._enqueued()
        try:
            return waiter.result(timeout_s)
        except TimeoutError:
            raise self._gave_up(waiter, timeout_s) from None
        except BaseException:
            self._withdraw(waiter)
            raise

    async def aacquire(self, timeout_s: float) -> int:
        """Take a slot without blocking the event loop; raises as `acquire`."""
        check_limit("timeout_s", timeout_s, allow_zero=True)
        waiter = self._enqueued()
        if waiter.done():
            return waiter.result()
        deadline = time.monotonic() + timeout_s
        try:
            return await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(waiter)), deadline - time.monotonic()
            )
        except TimeoutError:
            raise self._gave_up(waiter, timeout_s) from None
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def release(self, slot: int) -> None:
        """Give a slot back; the longest waiting caller gets it."""
        with self._lock:
            if slot not in self._leased:
                return
            self._leased.remove(slot)
            self._free.append(slot)
            self._hand_out()

    def pin(self, slots: Iterable[int]) -> None:
        """Take slots out of the lease for good.

        Raises:
            PoolError: One of them is leased.
        """
        slots = set(slots)
        with self._lock:
            self._check_open()
            if taken := sorted(slots & self._leased):
                raise PoolError(f"the slots {taken} are leased: release them first")
            self._pinned |= slots
            self._free = deque(slot for slot in self._free if slot not in slots)

    def close(self) -> None:
        """Refuse everybody who waits, now and later."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(PoolError("the pool was closed"))

    def _enqueued(self) -> Future[int]:
        waiter: Future[int] = Future()
        with self._lock:
            self._check_open()
            if len(self._pinned) == self._size:
                raise PoolError(
                    f"all {self._size} slots were given out by get_adapters: there is none to lease"
                )
            self._waiting.append(waiter)
            self._hand_out()
        return waiter

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            waiter = self._waiting.popleft()
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(self._take())

    def _take(self) -> int:
        slot = self._free.popleft()
        self._leased.add(slot)
        return slot

    def _withdraw(self, waiter: Future[int]) -> None:
        """Leave the queue; a slot that arrived meanwhile goes to the next."""
        with self._lock:
            if not waiter.done():
                waiter.cancel()
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                return
        if waiter.exception() is None:
            self.release(waiter.result())

    def _gave_up(self, waiter: Future[int], timeout_s: float) -> PoolError:
        self._withdraw(waiter)
        pinned = f", {len(self._pinned)} are given out by get_adapters" if self._pinned else ""
        error = PoolError(
            f"no slot became free within {timeout_s:g} s: {len(self._leased)} of {self._size} are "
            f"leased{pinned} and {len(self._waiting)} callers wait; make pool_size larger, close "
            "leased adapters, or raise lease_timeout_s",
            retryable=True,
        )
        error.kind = ErrorKind.CAPACITY
        return error

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("the pool is closed")
