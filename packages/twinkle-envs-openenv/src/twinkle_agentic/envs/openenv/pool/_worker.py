"""The worker of a shard of slots; the same class is a Ray actor and the pool of this process."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from twinkle_agentic.envs.openenv.pool._factory import EnvFactory, env_maker
from twinkle_agentic.envs.openenv.pool._messages import (
    Failure,
    Reply,
    failure_of,
    pack_replies,
    pack_reply,
)
from twinkle_agentic.envs.openenv.pool._slots import SlotCall, Slots

__all__ = ["CLOSE_POLL_S", "PendingCalls", "PoolWorker", "WorkerSpec"]

WorkerSpec = bytes | tuple[EnvFactory | None, Mapping[str, Any]]

CLOSE_POLL_S = 0.01
_SIGNAL_CHECK_S = 0.5  # one that arrives on the way into a longer wait would be seen at its end


class PoolWorker:
    """Serves the slots `[start, end)` to any number of threads at once.

    The constructor never raises: what is wrong with the factory is the reply to every call.

    Args:
        start: First slot.
        end: One past the last slot.
        spec: `(env_factory, env_kwargs)`, pickled where it comes from another process.
        slot_threads: Whether each slot has a thread of its own; `None` decides by `Env.instant`.
    """

    def __init__(self, start: int, end: int, spec: WorkerSpec, slot_threads: bool | None) -> None:
        self._incarnation = random.SystemRandom().getrandbits(31)
        self._broken: Failure | None = None
        self._slots: Slots | None = None
        try:
            factory, env_kwargs = pickle.loads(spec) if isinstance(spec, bytes) else spec
            make_env = env_maker(factory, env_kwargs)
        except Exception as error:
            self._broken = _import_failure(error)
        else:
            self._slots = Slots(
                start,
                end,
                make_env,
                share_thread=None if slot_threads is None else not slot_threads,
                incarnation=self._incarnation,
            )

    def run(self, requests: bytes) -> bytes:
        """Run calls side by side and wait for all; returns their packed replies, in order."""
        arrived = threading.Lock()
        arrived.acquire()
        pending = self.submit(requests, arrived.release)
        pending.wait(arrived)
        return pending.replies()

    def submit(self, requests: bytes, on_complete: Callable[[], None]) -> PendingCalls:
        """Queue calls; `on_complete` is called in any thread when all are done."""
        return PendingCalls(
            self._slots, self._broken, self._incarnation, pickle.loads(requests), on_complete
        )

    def begin_close(self) -> None:
        """Have every environment closed in its thread."""
        if self._slots is not None:
            self._slots.close()

    @property
    def num_open(self) -> int:
        """Threads that still run."""
        return 0 if self._slots is None else self._slots.num_open

    def stats(self) -> bytes:
        """Return pickled figures of this worker."""
        figures: dict[str, Any] = {} if self._slots is None else self._slots.stats()
        return pickle.dumps({"incarnation": self._incarnation, "pid": os.getpid(), **figures})

    def close(self, timeout_s: float) -> int:
        """Close all environments; returns how many threads did not end within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.begin_close()
        while self.num_open and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_S)
        return self.num_open


class PendingCalls:
    """The calls of one message, until the last has its reply.

    Attributes:
        limit_s: Seconds after which `expire` is due.
    """

    def __init__(
        self,
        slots: Slots | None,
        broken: Failure | None,
        incarnation: int,
        requests: list[Any],
        on_complete: Callable[[], None],
    ) -> None:
        self._slots = slots
        self._incarnation = incarnation
        self._on_complete = on_complete
        self._count_down = itertools.count(len(requests) - 1, -1)  # the threads share it
        self._calls = [
            SlotCall(request, position, self._done) for position, request in enumerate(requests)
        ]
        self._replies: list[Reply] = [b""] * len(requests)
        self.limit_s = max(call.timeout_s for call in self._calls)
        if slots is not None:
            slots.submit(self._calls)
            return
        for call in self._calls:
            call.finish(pack_reply(broken))

    def wait(self, complete: threading.Lock) -> None:
        """Block until a lock that `on_complete` releases is free, within the limits."""
        deadline = time.monotonic() + self.limit_s
        while True:
            left = deadline - time.monotonic()
            if complete.acquire(timeout=min(_SIGNAL_CHECK_S, max(0.0, left))):
                return
            if left <= 0:
                self.expire()  # all have a reply now, or in an instant
                deadline += _SIGNAL_CHECK_S

    def expire(self) -> None:
        """Give up on the calls that are not done; they get a reply that says so."""
        for call in self._calls:
            if not call.finished and self._slots is not None:
                self._slots.expire(call, self.limit_s)

    def replies(self) -> bytes:
        """Return the packed replies of all calls."""
        return pack_replies(self._incarnation, self._replies)

    def _done(self, position: int, reply: Reply) -> None:
        self._replies[position] = reply
        if next(self._count_down) == 0:
            self._on_complete()


def _import_failure(error: Exception) -> Failure:
    if isinstance(error, ImportError) and error.name:
        return Failure(
            text=f"the workers cannot import module {error.name!r}, which the environment or its "
            "arguments need: install it on the nodes of the workers, or send it along with "
            'worker_options={"runtime_env": {"py_modules": [...]}}'
            f" ({type(error).__name__}: {error})"
        )
    return failure_of(error, "the workers cannot make the environment")
