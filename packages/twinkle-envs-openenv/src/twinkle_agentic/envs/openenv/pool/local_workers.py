"""Workers in the driver itself: no Ray, no second process."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

from twinkle_agentic.envs.background import background_loop
from twinkle_agentic.envs.errors import EnvTimeoutError
from twinkle_agentic.envs.openenv.pool.worker import PoolWorker, WorkerSpec

__all__ = ["LocalWorkers"]

T = TypeVar("T")


class LocalWorkers:
    """One `PoolWorker` in this process; its coroutines run on the process-wide background loop."""

    def __init__(self, shards: list[range], spec: WorkerSpec) -> None:
        self.shards = shards
        (shard,) = shards
        self._worker = PoolWorker(shard.start, shard.stop, spec)

    def call(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Run a method of the worker and wait for it."""
        del worker
        future = self._submitted(method, argument)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise _no_answer(method, timeout_s) from None
        finally:
            future.cancel()

    async def acall(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Run a method of the worker and await it."""
        del worker
        future = asyncio.wrap_future(self._submitted(method, argument))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise _no_answer(method, timeout_s) from None

    def recycle(self, worker: int) -> None:
        """Do nothing: the driver cannot replace itself."""

    def shut_down(self) -> None:
        """Do nothing: the worker's environments are closed already."""

    def _submitted(self, method: str, argument: Any) -> concurrent.futures.Future[Any]:
        work: Coroutine[Any, Any, Any] = (
            getattr(self._worker, method)()
            if argument is None
            else getattr(self._worker, method)(argument)
        )
        return asyncio.run_coroutine_threadsafe(work, background_loop())


def _no_answer(method: str, timeout_s: float) -> EnvTimeoutError:
    return EnvTimeoutError(f"the pool gave no answer to {method} within {timeout_s:g} s")
