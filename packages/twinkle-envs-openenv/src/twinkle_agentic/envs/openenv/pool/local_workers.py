"""Workers in the driver itself: no Ray, no second process."""

from __future__ import annotations

import asyncio
import pickle
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_agentic.envs.errors import EnvTimeoutError
from twinkle_agentic.envs.openenv.pool.slots import SlotCall
from twinkle_agentic.envs.openenv.pool.wire import SlotRequest
from twinkle_agentic.envs.openenv.pool.worker import PoolWorker, WorkerSpec

__all__ = ["LocalWorkers"]

_LOOK_S = 0.5  # a signal that arrives on the way into a long wait would be acted on at its end


@dataclass(frozen=True, slots=True)
class _Begun:
    """Calls on their way, and where their replies arrive."""

    calls: Sequence[SlotCall]
    arrivals: queue.SimpleQueue[tuple[int, bytes]]
    limit_s: float


class LocalWorkers:
    """One `PoolWorker` in this process.

    The synchronous calls need no event loop, so they work on a thread that runs one, too; the
    coroutines run on the loop of whoever awaits them.
    """

    def __init__(self, shards: list[range], spec: WorkerSpec, *, slot_threads: bool) -> None:
        self.shards = shards
        (shard,) = shards
        self._worker = PoolWorker(shard.start, shard.stop, spec, slot_threads)

    def start(self, worker: int, method: str, argument: bytes) -> _Begun:
        """Queue a call, or the calls of a batch, in the threads of their slots."""
        del worker
        loaded: Any = pickle.loads(argument)
        requests: list[SlotRequest] = loaded if method == "batch" else [loaded]
        arrivals: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        calls = self._worker.submit_all(
            requests, lambda position, reply: arrivals.put((position, reply))
        )
        return _Begun(calls, arrivals, max(request.timeout_s for request in requests))

    def finish(self, worker: int, method: str, begun: _Begun, timeout_s: float) -> bytes:
        """Wait for the replies; calls that are not done within their limit get one that says so."""
        del worker, timeout_s  # the requests have limits of their own
        deadline = time.monotonic() + begun.limit_s
        replies: dict[int, bytes] = {}
        while len(replies) < len(begun.calls):
            left = deadline - time.monotonic()
            if left <= 0:
                self._worker.expire(begun.calls, begun.limit_s)
            try:
                position, reply = begun.arrivals.get(timeout=min(max(0.01, left), _LOOK_S))
            except queue.Empty:
                continue
            replies[position] = reply
        ordered = [replies[position] for position in range(len(begun.calls))]
        return pickle.dumps(ordered) if method == "batch" else ordered[0]

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
        """Tell what is still open to close: nothing, where the pool was closed properly."""
        self._worker.tell_close()
