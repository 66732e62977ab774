"""The worker that is a Ray actor: a thread of Ray waits for each call."""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
from collections.abc import Sequence

from twinkle_agentic.envs.openenv.pool.slots import SlotCall
from twinkle_agentic.envs.openenv.pool.wire import SlotRequest
from twinkle_agentic.envs.openenv.pool.worker import ShardSlots, WorkerSpec

__all__ = ["ThreadWorker"]

_CLOSE_POLL_S = 0.01


class ThreadWorker(ShardSlots):
    """Serves its slots to many threads at once, each of which waits for what it asked.

    Two calls of one slot may overtake each other on their way here; the slot refuses what belongs
    to an earlier episode than its latest reset.
    """

    def __init__(self, start: int, end: int, spec: WorkerSpec, slot_threads: bool) -> None:
        super().__init__(start, end, spec, slot_threads)
        self._tokens = itertools.count(1)
        self._batches: dict[int, _Batch] = {}

    def start(self, timeout_s: float) -> bytes:
        """Make the first environment and return its tools: a wrong setting shows at once."""
        return self._one(self.first_make(timeout_s))

    def call(self, request: bytes) -> bytes:
        """Run one slot call; returns a packed reply."""
        return self._one(pickle.loads(request))

    def batch(self, requests: bytes) -> bytes:
        """Run calls side by side; returns the pickled list of packed replies, in their order."""
        return pickle.dumps(self._all(pickle.loads(requests)))

    def begin(self, requests: bytes) -> bytes:
        """Start calls and return as soon as one of them is done; `poll` gives the others."""
        token = next(self._tokens)
        self._batches[token] = _Batch(self, pickle.loads(requests))
        return self.poll(token)

    def poll(self, token: int) -> bytes:
        """Wait until more calls of a batch are done.

        Returns:
            Pickled `(token, {position: packed reply})`.
        """
        batch = self._batches[token]
        fresh = batch.some_done()
        if not batch.num_left:
            del self._batches[token]
        return pickle.dumps((token, fresh))

    def stats(self) -> bytes:
        """Return pickled figures of this worker."""
        return self.figures()

    def close(self, timeout_s: float) -> int:
        """Close all environments; returns how many did not close within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.tell_close()
        while self.num_open and time.monotonic() < deadline:
            time.sleep(_CLOSE_POLL_S)
        return self.num_open

    def _one(self, request: SlotRequest) -> bytes:
        replies: list[bytes] = []
        arrived = threading.Lock()
        arrived.acquire()

        def on_done(reply: bytes) -> None:
            replies.append(reply)
            arrived.release()

        call = self.submit(request, on_done)
        self._wait_for(arrived, [call], request.timeout_s)
        return replies[0]

    def _all(self, requests: Sequence[SlotRequest]) -> list[bytes]:
        if not requests:
            return []
        replies = [b""] * len(requests)
        count_down = itertools.count(len(requests) - 1, -1)  # the threads share it
        all_arrived = threading.Lock()
        all_arrived.acquire()

        def on_done(position: int, reply: bytes) -> None:
            replies[position] = reply
            if next(count_down) == 0:
                all_arrived.release()

        calls = self.submit_all(requests, on_done)
        self._wait_for(all_arrived, calls, max(request.timeout_s for request in requests))
        return replies

    def _wait_for(self, arrived: threading.Lock, calls: Sequence[SlotCall], limit_s: float) -> None:
        """Wait for a lock that the last reply releases; give up on what takes longer."""
        if not arrived.acquire(timeout=limit_s):
            self.expire(calls, limit_s)  # so that all have an answer now, or in an instant
            arrived.acquire()


class _Batch:
    """Calls in flight, whose replies are fetched a few at a time."""

    def __init__(self, worker: ShardSlots, requests: Sequence[SlotRequest]) -> None:
        self.num_left = len(requests)  # calls whose reply was not taken yet
        self._worker = worker
        self._limit_s = max((request.timeout_s for request in requests), default=0.0)
        self._deadline = time.monotonic() + self._limit_s
        self._arrivals: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._calls = worker.submit_all(
            requests, lambda position, reply: self._arrivals.put((position, reply))
        )

    def some_done(self) -> dict[int, bytes]:
        """Wait for at least one more call and take what is done since the last time."""
        fresh: dict[int, bytes] = {}
        if self.num_left:
            position, reply = self._next()
            fresh[position] = reply
        while True:
            try:
                position, reply = self._arrivals.get_nowait()
            except queue.Empty:
                break
            fresh[position] = reply
        self.num_left -= len(fresh)
        return fresh

    def _next(self) -> tuple[int, bytes]:
        try:
            return self._arrivals.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self._worker.expire(self._calls, self._limit_s)
            return self._arrivals.get()
