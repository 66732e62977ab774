"""The worker of a pool without Ray: in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

from twinkle_agentic.envs.openenv.pool._worker import CLOSE_POLL_S, Batch, PoolWorker, WorkerSpec

__all__ = ["LocalBackend"]


class LocalBackend:
    """One `PoolWorker` in this process; its methods are those of `RayBackend`."""

    def __init__(self, shards: list[range], spec: WorkerSpec, *, slot_threads: bool | None) -> None:
        self.shards = shards
        (shard,) = shards
        self._worker = PoolWorker(shard.start, shard.stop, spec, slot_threads)

    def send(self, worker: int, requests: bytes) -> tuple[Batch, threading.Lock]:
        """Queue calls in the threads of their slots; returns what `receive` takes."""
        complete = threading.Lock()
        complete.acquire()
        return self._worker.submit(requests, complete.release), complete

    def receive(
        self, worker: int, pending: tuple[Batch, threading.Lock], timeout_s: float
    ) -> bytes:
        """Wait for the replies; the calls have limits of their own."""
        batch, complete = pending
        self._worker.wait(batch, complete)
        return self._worker.replies(batch)

    async def acall(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Run a method of the worker without blocking the event loop."""
        if method == "stats":
            return self._worker.stats()
        return await (self._close if method == "close" else self._run)(argument)

    def recycle(self, worker: int) -> None:
        """Do nothing: this process cannot be replaced."""

    def shut_down(self) -> None:
        """Close what is still open, without waiting: nothing, where the pool was closed."""
        self._worker.begin_close()

    async def _run(self, requests: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        complete = asyncio.Event()

        def on_complete() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(complete.set)

        batch = self._worker.submit(requests, on_complete)
        # It stays where this coroutine is cancelled: a call that hangs must not keep its slot.
        timer = loop.call_later(batch.limit_s, self._worker.expire, batch)
        await complete.wait()
        timer.cancel()
        return self._worker.replies(batch)

    async def _close(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        self._worker.begin_close()
        # Threads end without waking a loop.
        while self._worker.num_open and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(CLOSE_POLL_S)
        return self._worker.num_open
