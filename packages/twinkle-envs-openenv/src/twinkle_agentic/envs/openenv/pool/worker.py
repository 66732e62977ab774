"""The worker of a shard: what it does wherever it runs, and the one that lives in the driver.

The environments run in the threads of the slots; `PoolWorker` awaits them on the loop of its
caller, and `thread_worker.ThreadWorker` waits for them in threads of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import pickle
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_agentic.envs.openenv.pool.factory import EnvFactory, env_maker
from twinkle_agentic.envs.openenv.pool.slots import SlotCall, SlotHost
from twinkle_agentic.envs.openenv.pool.wire import (
    Failure,
    SlotRequest,
    failure_of,
    pack_reply,
)

__all__ = ["PoolWorker", "ShardSlots", "WorkerSpec"]

WorkerSpec = bytes | tuple[EnvFactory | None, Mapping[str, Any]]


_CLOSE_POLL_S = 0.01


class ShardSlots:
    """The slots `[start, end)` of one worker. Thread-safe.

    The constructor never raises: what is wrong with the factory is the answer of `start` and of
    every call.

    Args:
        start: First slot.
        end: One past the last slot.
        spec: `(env_factory, env_kwargs)`, pickled where it comes from another process.
        slot_threads: Whether each slot has a thread of its own; else all share one.
    """

    def __init__(self, start: int, end: int, spec: WorkerSpec, slot_threads: bool) -> None:
        self._range = range(start, end)
        self._incarnation = random.SystemRandom().getrandbits(31)
        self._broken: Failure | None = None
        self._host: SlotHost | None = None
        try:
            factory, env_kwargs = pickle.loads(spec) if isinstance(spec, bytes) else spec
            make_env = env_maker(factory, env_kwargs)
        except Exception as error:
            self._broken = _import_failure(error)
        else:
            self._host = SlotHost(
                start, end, make_env, slot_threads=slot_threads, incarnation=self._incarnation
            )

    def submit(self, request: SlotRequest, on_done: Callable[[bytes], None]) -> SlotCall:
        """Queue a call in the thread of its slot; `on_done` gets the packed reply in any thread."""
        call = SlotCall(request, on_done)
        if self._host is None:
            call.finished = True
            on_done(pack_reply(self._incarnation, self._broken))
        else:
            self._host.submit(call)
        return call

    def submit_all(
        self, requests: Sequence[SlotRequest], on_done: Callable[[int, bytes], None]
    ) -> list[SlotCall]:
        """Queue many calls; `on_done` gets the position of each and its packed reply."""
        return [
            self.submit(request, functools.partial(on_done, position))
            for position, request in enumerate(requests)
        ]

    def expire(self, calls: Sequence[SlotCall], after_s: float) -> None:
        """Give up on those of the calls that are not finished; they get a reply that says so."""
        if self._host is not None:
            for call in calls:
                if not call.finished:
                    self._host.expire(call, after_s)

    def tell_close(self) -> None:
        """Tell all environments to close, each in its thread, and wait for none."""
        if self._host is not None:
            self._host.close()

    def first_make(self, timeout_s: float) -> SlotRequest:
        """Return the request that makes the first environment: a wrong setting shows at once."""
        return SlotRequest(op="make", slot=self._range.start, timeout_s=timeout_s)

    def figures(self) -> bytes:
        """Return pickled figures of this worker."""
        figures: dict[str, Any] = {} if self._host is None else self._host.stats()
        return pickle.dumps({"incarnation": self._incarnation, "pid": os.getpid(), **figures})

    @property
    def num_open(self) -> int:
        """Threads of slots that still run."""
        return 0 if self._host is None else self._host.num_open


class PoolWorker(ShardSlots):
    """Serves its slots on the event loop that calls it; one loop holds any number of calls."""

    def __init__(self, start: int, end: int, spec: WorkerSpec, slot_threads: bool) -> None:
        super().__init__(start, end, spec, slot_threads)
        self._batches: dict[int, _Batch] = {}
        self._next_token = 0

    async def start(self, timeout_s: float) -> bytes:
        """Make the first environment and return its tools: a wrong setting shows at once."""
        return await self._one(self.first_make(timeout_s))

    async def call(self, request: bytes) -> bytes:
        """Run one slot call; returns a packed reply."""
        return await self._one(pickle.loads(request))

    async def batch(self, requests: bytes) -> bytes:
        """Run calls side by side; returns the pickled list of packed replies, in their order."""
        batch = self._begin(pickle.loads(requests))
        await batch.all_done()
        return pickle.dumps(batch.replies)

    async def begin(self, requests: bytes) -> bytes:
        """Start calls and return as soon as one of them is done; `poll` gives the others."""
        batch = self._begin(pickle.loads(requests), piecemeal=True)
        self._next_token += 1
        self._batches[self._next_token] = batch
        return await self.poll(self._next_token)

    async def poll(self, token: int) -> bytes:
        """Wait until more calls of a batch are done.

        Returns:
            Pickled `(token, {position: packed reply})`.
        """
        batch = self._batches[token]
        fresh = await batch.some_done()
        if not batch.num_left:
            del self._batches[token]
        return pickle.dumps((token, fresh))

    async def stats(self) -> bytes:
        """Return pickled figures of this worker."""
        return self.figures()

    async def close(self, timeout_s: float) -> int:
        """Close all environments; returns how many did not close within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.tell_close()
        # Threads end without telling a loop.
        while self.num_open and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_CLOSE_POLL_S)
        return self.num_open

    async def _one(self, request: SlotRequest) -> bytes:
        batch = self._begin([request])
        await batch.all_done()
        return batch.replies[0]

    def _begin(self, requests: list[SlotRequest], *, piecemeal: bool = False) -> _Batch:
        batch = _Batch(len(requests), piecemeal=piecemeal)
        limit_s = max((request.timeout_s for request in requests), default=0.0)
        calls: list[SlotCall] = []
        batch.expire_after(limit_s, self.expire, calls)
        for position, request in enumerate(requests):
            calls.append(self.submit(request, functools.partial(batch.done, position)))
        return batch


class _Batch:
    """Calls in flight: filled from the threads of the slots, awaited on the loop that made it.

    Args:
        size: How many calls.
        piecemeal: Wake the loop for each call, not only for the last one.
    """

    def __init__(self, size: int, *, piecemeal: bool) -> None:
        self.replies: list[bytes] = [b""] * size
        self.num_left = size  # calls whose reply was not taken yet
        self._piecemeal = piecemeal
        self._loop = asyncio.get_running_loop()
        self._count_down = itertools.count(size - 1, -1)  # the threads share it
        self._fresh: deque[int] = deque()
        self._woken = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if not size:
            self._woken.set()

    def done(self, position: int, reply: bytes) -> None:
        """Take in a reply; called in any thread, once for each position."""
        self.replies[position] = reply
        self._fresh.append(position)
        if next(self._count_down) == 0 or self._piecemeal:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._woken.set)

    def expire_after(
        self,
        timeout_s: float,
        expire: Callable[[Sequence[SlotCall], float], None],
        calls: Sequence[SlotCall],
    ) -> None:
        """Give up on the calls that are not done by then."""
        self._timer = self._loop.call_later(timeout_s, expire, calls, timeout_s)

    async def all_done(self) -> None:
        """Wait for the last call."""
        await self._woken.wait()
        self._stop_timer()

    async def some_done(self) -> dict[int, bytes]:
        """Wait for at least one more call and take what is done since the last time."""
        if self.num_left and not self._fresh:
            self._woken.clear()
            if not self._fresh:  # a thread may have been faster
                await self._woken.wait()
        fresh: dict[int, bytes] = {}
        while self._fresh:
            position = self._fresh.popleft()
            fresh[position] = self.replies[position]
        self.num_left -= len(fresh)
        if not self.num_left:
            self._stop_timer()
        return fresh

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _import_failure(error: Exception) -> Failure:
    if isinstance(error, ImportError) and error.name:
        return Failure(
            text=f"the workers cannot import module {error.name!r}, which the environment or its "
            "arguments need: install it on the nodes of the workers, or send it along with "
            'worker_options={"runtime_env": {"py_modules": [...]}}'
            f" ({type(error).__name__}: {error})"
        )
    return failure_of(error, "the workers cannot make the environment")
