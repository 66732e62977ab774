"""The worker of a shard of slots; the same class is a Ray actor and the pool of this process.

Many libraries demand that an object is made, used and closed in one thread, and a slow environment
must not hold up its neighbours: each slot has a thread of its own, unless its environment says that
it is instant. A thread that hangs is given up with the environments in it; their slots go on with
new ones.

The threads of a batch wake each other, each the next before its own step: woken all at once they
compete for the interpreter, which costs an instant step 45 us in place of 6 (64 slots).
"""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from twinkle_agentic.envs.errors import ErrorKind
from twinkle_agentic.envs.openenv.pool._env_slot import EnvInstance, SlotThread
from twinkle_agentic.envs.openenv.pool._factory import EnvFactory, env_maker
from twinkle_agentic.envs.openenv.pool._messages import (
    Failure,
    Reply,
    SlotRequest,
    failure_of,
    pack_replies,
    pack_reply,
    pack_step,
)

__all__ = ["CLOSE_POLL_S", "Batch", "PoolWorker", "WorkerSpec"]

WorkerSpec = bytes | tuple[EnvFactory | None, Mapping[str, Any]]

CLOSE_POLL_S = 0.01
_SIGNAL_CHECK_S = 0.5  # one that arrives just before a longer wait would be seen at its end
_KEPT_STEP_TIMES = 2_048  # per worker, for the percentiles
_BLOCKING_STEP_GRACE_S = 1.0  # worth waiting for what nearly is done: a new environment costs more


class Batch:
    """The calls of one message, until the last has its reply.

    Args:
        requests: Of the message.
        on_complete: Called in any thread when all have a reply.

    Attributes:
        limit_s: Seconds the calls may take, by the most patient of them.
        replies: One per request; `None` until it is there.
        waiting: Threads that are to be woken, and the positions of their calls.
    """

    def __init__(self, requests: list[SlotRequest], on_complete: Callable[[], None]) -> None:
        self.requests = requests
        self.replies: list[Reply | None] = [None] * len(requests)
        self.limit_s = max(request.timeout_s for request in requests)
        self.waiting: Iterator[tuple[SlotThread, list[int]]] = iter(())
        self._on_complete = on_complete
        self._missing = len(requests)

    def finish(self, position: int, reply: Reply) -> None:
        """Give a call its reply, unless it has one. The lock of the worker is held."""
        if self.replies[position] is not None:
            return
        self.replies[position] = reply
        self._missing -= 1
        if self._missing == 0:
            self._on_complete()

    @property
    def complete(self) -> bool:
        """Whether all calls have a reply."""
        return self._missing == 0

    def unfinished(self) -> Iterator[tuple[int, SlotRequest]]:
        """Yield the calls without a reply, with their positions."""
        for position, request in enumerate(self.requests):
            if self.replies[position] is None:
                yield position, request


class PoolWorker:
    """Serves the slots `[start, end)` to any number of threads at once.

    Environments are made on first use. The constructor never raises: what is wrong with the factory
    is the reply to every call.

    Args:
        start: First slot.
        end: One past the last slot.
        spec: `(env_factory, env_kwargs)`, pickled where it comes from another process.
        slot_threads: Whether each slot has a thread of its own; `None` decides by `Env.instant` of
            the first environment.
    """

    def __init__(self, start: int, end: int, spec: WorkerSpec, slot_threads: bool | None) -> None:
        self._incarnation = random.SystemRandom().getrandbits(31)
        self._share_thread = None if slot_threads is None else not slot_threads
        self._lock = threading.Lock()
        self._closed = False
        self._broken: Failure | None = None
        self._abandoned = 0
        self._steps = 0
        self._step_times_s: deque[float] = deque(maxlen=_KEPT_STEP_TIMES)
        self._batches: set[Batch] = set()  # those that may have calls without a reply
        self._instances: dict[int, EnvInstance] = {}
        self._episodes = dict.fromkeys(range(start, end), 0)  # as the driver counts them
        try:
            factory, env_kwargs = pickle.loads(spec) if isinstance(spec, bytes) else spec
            self._make_env = env_maker(factory, env_kwargs)
        except Exception as error:
            self._broken = _import_failure(error)
            return
        shared = SlotThread()
        for slot in range(start, end):
            self._instances[slot] = EnvInstance(
                self._make_env, shared if self._share_thread else SlotThread()
            )

    def run(self, requests: bytes) -> bytes:
        """Run calls side by side and wait for all; returns their packed replies, in order."""
        arrived = threading.Lock()
        arrived.acquire()
        batch = self.submit(requests, arrived.release)
        self.wait(batch, arrived)
        return self.replies(batch)

    def submit(self, requests: bytes, on_complete: Callable[[], None]) -> Batch:
        """Queue calls; those of one slot run in order.

        Calls from an earlier episode than that of the slot's latest reset are rejected. A call that
        still runs when a reset arrives is given up after 1 s.

        Args:
            requests: Made by `pack_requests`.
            on_complete: Called in any thread when all have a reply.
        """
        batch = Batch([SlotRequest._make(each) for each in pickle.loads(requests)], on_complete)
        threads: dict[SlotThread, list[int]] = {}
        with self._lock:
            refusal = Failure(text="the pool is closed") if self._closed else self._broken
            if refusal is not None:
                for position in range(len(batch.requests)):
                    batch.finish(position, pack_reply(refusal))
                return batch
            for position, request in enumerate(batch.requests):
                slot = request.slot
                thread = self._instances[slot].thread
                if request.op == "reset":
                    self._episodes[slot] = max(self._episodes[slot], request.episode)
                    if thread.pending and not self._share_thread:
                        self._abandon_step_blocking_reset_later(batch, position)
                threads.setdefault(thread, []).append(position)
            self._batches = {each for each in self._batches if not each.complete} | {batch}
            batch.waiting = iter(threads.items())
            self._wake_next(batch)
        return batch

    def wait(self, batch: Batch, complete: threading.Lock) -> None:
        """Block until a lock that `on_complete` releases is free, within the limits."""
        deadline = time.monotonic() + batch.limit_s
        while True:
            left = deadline - time.monotonic()
            if complete.acquire(timeout=min(_SIGNAL_CHECK_S, max(0.0, left))):
                return
            if left <= 0:
                self.expire(batch)  # all have a reply now, or in an instant
                deadline += _SIGNAL_CHECK_S

    def expire(self, batch: Batch) -> None:
        """Give up on the calls that have no reply: their episodes are lost, and their threads."""
        for position, _ in batch.unfinished():
            self._give_up(batch, position, f"gave no answer within {batch.limit_s:g} s")

    def replies(self, batch: Batch) -> bytes:
        """Return the packed replies of a complete batch."""
        return pack_replies(self._incarnation, batch.replies)

    def stats(self) -> bytes:
        """Return pickled figures; `abandoned` counts the threads that were given up."""
        times = sorted(self._step_times_s)
        with self._lock:
            running = [request for batch in self._batches for _, request in batch.unfinished()]
        return pickle.dumps(
            {
                "incarnation": self._incarnation,
                "pid": os.getpid(),
                "slots": len(self._episodes),
                "busy": len({request.slot for request in running}),
                "lost": [slot for slot, each in self._instances.items() if each.lost is not None],
                "abandoned": self._abandoned,
                "steps": self._steps,
                "step_p50_ms": _percentile_ms(times, 0.50),
                "step_p99_ms": _percentile_ms(times, 0.99),
            }
        )

    def begin_close(self) -> None:
        """Have every environment closed in its thread."""
        with self._lock:
            self._closed = True
            for thread in self._threads():
                thread.calls.put(None)

    @property
    def num_open(self) -> int:
        """Threads that still run; abandoned ones are not counted."""
        return sum(thread.is_alive for thread in self._threads())

    def close(self, timeout_s: float) -> int:
        """Close all environments; returns how many threads did not end within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self.begin_close()
        while self.num_open and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_S)
        return self.num_open

    def _threads(self) -> set[SlotThread]:
        return {instance.thread for instance in self._instances.values()}

    def _wake_next(self, batch: Batch) -> None:
        """Hand calls to the next thread of a batch. The lock is held.

        One that is busy cannot wake its successor at once, so that is woken, too.
        """
        for thread, positions in batch.waiting:
            if not thread.abandoned and self._queue(thread, batch, positions):
                return

    def _queue(self, thread: SlotThread, batch: Batch, positions: list[int]) -> bool:
        """Hand calls to a thread; returns whether it was idle. The lock is held."""
        if thread.thread is None:
            name = "slots" if self._share_thread else f"slot-{batch.requests[positions[0]].slot}"
            thread.thread = threading.Thread(
                target=self._serve, args=(thread,), name=name, daemon=True
            )
            thread.thread.start()
        thread.pending += 1
        thread.calls.put((batch, positions))
        return thread.pending == 1

    def _serve(self, thread: SlotThread) -> None:
        """Run in a slot thread until it is closed or abandoned."""
        while not thread.abandoned and (job := thread.calls.get()) is not None:
            if isinstance(job, EnvInstance):  # another one has taken its place
                job.dispose()
                thread.instances.discard(job)
                continue
            batch, positions = job
            with self._lock:
                self._wake_next(batch)
            self._run_calls(thread, batch, positions)
            with self._lock:
                thread.pending -= 1
        for instance in list(thread.instances):
            instance.dispose()
        if thread.abandoned:
            with self._lock:
                self._abandoned -= 1

    def _run_calls(self, thread: SlotThread, batch: Batch, positions: list[int]) -> None:
        for position in positions:
            if batch.replies[position] is not None:
                continue
            request = batch.requests[position]
            instance = self._instances[request.slot]
            if instance.thread is not thread:  # it was abandoned
                return
            thread.current = batch, position
            reply = self._run_call(instance, request)
            with self._lock:
                thread.current = None
                batch.finish(position, reply)
            if thread.abandoned:
                return
            if instance.lost is not None:
                instance.dispose()  # its state is unknown

    def _run_call(self, instance: EnvInstance, request: SlotRequest) -> Reply:
        op, slot, args, _, incarnation, episode = request
        if incarnation is not None and incarnation != self._incarnation:
            lost = Failure(
                text=f"slot {slot}: the episode was lost with its worker process; reset the slot "
                "for a new one",
                retryable=True,
                worker_lost=True,
            )
            return pack_reply(lost)
        if episode < self._episodes[slot] and op in ("reset", "step"):
            return pack_reply(Failure(text=f"slot {slot}: it was reset before this {op} began"))
        started = time.perf_counter()
        value: Any = instance.run(op, slot, args)
        if op == "step":
            if not isinstance(value, Failure):
                self._step_times_s.append(time.perf_counter() - started)
                self._steps += 1
            return pack_step(value)
        if self._share_thread is None and instance.is_instant:
            self._share_one_thread(instance.thread)
        return pack_reply(value)

    def _share_one_thread(self, home: SlotThread) -> None:
        """Let the slots without an environment live in the thread of an instant one."""
        with self._lock:
            self._share_thread = True
            for slot, instance in self._instances.items():
                if instance.thread.thread is None:
                    self._replace(slot, home, instance.lost)

    def _replace(self, slot: int, thread: SlotThread, lost: Failure | None) -> None:
        self._instances[slot] = EnvInstance(self._make_env, thread, lost)

    def _abandon_step_blocking_reset_later(self, batch: Batch, position: int) -> None:
        timer = threading.Timer(
            _BLOCKING_STEP_GRACE_S, self._abandon_step_blocking_reset, (batch, position)
        )
        timer.daemon = True
        timer.start()

    def _abandon_step_blocking_reset(self, batch: Batch, position: int) -> None:
        """Give up on what keeps a reset from starting and belongs to an episode before it."""
        reset = batch.requests[position]
        current = self._instances[reset.slot].thread.current
        if batch.replies[position] is None and current is not None:
            running, at = current
            if running.requests[at].episode < reset.episode:
                self._give_up(running, at, "was still running when the slot was reset")

    def _give_up(self, batch: Batch, position: int, why: str) -> None:
        op, slot, *_ = batch.requests[position]
        failure = Failure(
            text=f"slot {slot}: {op} {why}; the environment is given up, reset the slot for a new "
            "one",
            kind=ErrorKind.TIMEOUT.value,
            retryable=True,
        )
        failed = [(batch, position, failure)]
        with self._lock:
            if batch.replies[position] is not None or self._broken is not None:
                return
            instance = self._instances[slot]
            thread = instance.thread
            if not self._share_thread or thread.current == (batch, position):
                failed += self._abandon(thread, batch, position, failure)
            else:  # it only waits behind another slot, which has its own limit
                self._replace(slot, thread, failure)
                thread.calls.put(instance)
            for each, at, reason in failed:
                each.finish(at, pack_reply(reason))

    def _abandon(
        self, old: SlotThread, stuck: Batch, stuck_at: int, failure: Failure
    ) -> list[tuple[Batch, int, Failure]]:
        """Give up a thread; returns the queued calls that are lost with it. The lock is held."""
        old.abandoned = True
        old.calls.put(None)
        self._abandoned += 1
        new = SlotThread()
        stuck_slot = stuck.requests[stuck_at].slot
        beside = Failure(
            text=f"the thread of all slots of this worker hangs in slot {stuck_slot}, and every "
            "episode in it is lost; reset the slot for a new one",
            kind=failure.kind,
            retryable=True,
        )
        for slot, instance in self._instances.items():
            if slot == stuck_slot:
                self._replace(slot, new, failure)
            elif instance.thread is old:
                self._replace(slot, new, beside if instance.in_episode else instance.lost)
        failed: list[tuple[Batch, int, Failure]] = []
        for batch in self._batches:
            for position, request in batch.unfinished():
                instance = self._instances[request.slot]
                if instance.thread is not new or (batch is stuck and position == stuck_at):
                    continue
                if request.op in ("reset", "make"):  # they start anew anyway
                    self._queue(new, batch, [position])
                else:
                    failed.append((batch, position, instance.lost or beside))
        if self._closed:
            new.calls.put(None)
        return failed


def _import_failure(error: Exception) -> Failure:
    if isinstance(error, ImportError) and error.name:
        return Failure(
            text=f"the workers cannot import module {error.name!r}, which the environment or its "
            "arguments need: install it on the nodes of the workers, or send it along with "
            'worker_options={"runtime_env": {"py_modules": [...]}}'
            f" ({type(error).__name__}: {error})"
        )
    return failure_of(error, "the workers cannot make the environment")


def _percentile_ms(times_s: list[float], share: float) -> float | None:
    if not times_s:
        return None
    return 1e3 * times_s[min(len(times_s) - 1, int(share * len(times_s)))]
