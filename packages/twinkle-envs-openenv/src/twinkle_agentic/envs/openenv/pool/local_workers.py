"""Workers in the driver itself: no Ray, no second process."""

from __future__ import annotations

import asyncio
from typing import Any

from twinkle_agentic.envs.errors import EnvTimeoutError
from twinkle_agentic.envs.openenv.pool.worker import PoolWorker, WorkerSpec

__all__ = ["LocalWorkers"]


class LocalWorkers:
    """One `PoolWorker` in this process; its coroutines run on the loop of whoever awaits them."""

    def __init__(self, shards: list[range], spec: WorkerSpec, *, slot_threads: bool) -> None:
        self.shards = shards
        (shard,) = shards
        self._worker = PoolWorker(shard.start, shard.stop, spec, slot_threads)

    def call(self, worker: int, request: bytes, timeout_s: float) -> bytes:
        """Run one slot call in the slot's thread and wait for it, without any event loop."""
        del worker, timeout_s  # the request has its own limit
        return self._worker.call_blocking(request)

    async def acall(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Run a method of the worker and await it."""
        del worker
        run = getattr(self._worker, method)
        try:
            async with asyncio.timeout(timeout_s):
                return await (run() if argument is None else run(argument))
        except TimeoutError:
            raise EnvTimeoutError(
                f"the pool gave no answer to {method} within {timeout_s:g} s"
            ) from None

    def recycle(self, worker: int) -> None:
        """Do nothing: the driver cannot replace itself."""

    def shut_down(self) -> None:
        """Close what `close` of the worker has not: nothing, where the pool was closed properly."""
        self._worker.abandon()
