"""The slots of one worker: in which thread each environment lives, and what happens when one hangs.

Many libraries demand that an object is made, used and closed in one thread, and a slow environment
must not hold up its neighbours: each slot has a thread of its own, unless its environment says that
it is instant. A thread that hangs is given up with the environments in it; their slots go on with
new ones.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from twinkle_agentic.envs.base import Env
from twinkle_agentic.envs.errors import ErrorKind
from twinkle_agentic.envs.openenv.pool._env_slot import EnvInstance
from twinkle_agentic.envs.openenv.pool._messages import (
    Failure,
    Op,
    Reply,
    SlotRequest,
    pack_reply,
)

__all__ = ["SlotCall", "SlotThread", "Slots"]

_KEPT_STEP_TIMES = 2_048  # per worker, for the percentiles
_OVERTAKEN_GRACE_S = 1.0  # worth waiting for what nearly is done: a new environment costs more


class SlotCall:
    """One call on its way through a slot; `on_done` gets the reply once, in any thread."""

    __slots__ = (
        "args",
        "episode",
        "finished",
        "incarnation",
        "instance",
        "on_done",
        "op",
        "position",
        "slot",
        "timeout_s",
    )

    def __init__(
        self, request: SlotRequest, position: int, on_done: Callable[[int, Reply], None]
    ) -> None:
        self.op: Op
        self.op, self.slot, self.args, self.timeout_s, self.incarnation, self.episode = request
        self.position = position
        self.on_done = on_done
        self.finished = False
        self.instance: EnvInstance | None = None

    def finish(self, reply: Reply) -> None:
        self.on_done(self.position, reply)


class SlotThread:
    """A thread, its queue of calls, and the environments that live in it."""

    __slots__ = ("abandoned", "calls", "current", "instances", "thread")

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[SlotCall | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.instances: set[EnvInstance] = set()
        self.current: SlotCall | None = None
        self.abandoned = False


class Slots:
    """The slots `[start, end)`; their environments are made on first use. Thread-safe.

    Args:
        start: First slot.
        end: One past the last slot.
        make_env: Makes an environment; called in the slot's thread.
        share_thread: Whether all slots live in one thread; `None` decides by `Env.instant` of the
            first environment.
        incarnation: Tells this life of the process from others.
    """

    def __init__(
        self,
        start: int,
        end: int,
        make_env: Callable[[], Env],
        *,
        share_thread: bool | None,
        incarnation: int,
    ) -> None:
        self._make_env = make_env
        self._share_thread = share_thread
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._closed = False
        self._abandoned = 0
        self._steps = 0
        self._step_times_s: deque[float] = deque(maxlen=_KEPT_STEP_TIMES)
        slots = range(start, end)
        shared = SlotThread()
        self._instances = {
            slot: EnvInstance(make_env, shared if share_thread else SlotThread()) for slot in slots
        }
        self._open_calls = dict.fromkeys(slots, 0)
        self._episodes = dict.fromkeys(slots, 0)  # of the latest reset, as the driver counts them

    def submit(self, calls: Iterable[SlotCall]) -> None:
        """Queue calls; those of one slot run in order.

        Calls from an earlier episode than that of the slot's latest reset are rejected. A call that
        still runs when a reset arrives is given up after 1 s.
        """
        refused: list[tuple[SlotCall, str]] = []
        with self._lock:
            for call in calls:
                if why := self._refusal(call):
                    call.finished = True
                    refused.append((call, why))
                    continue
                if call.op == "reset":
                    self._episodes[call.slot] = call.episode
                    if not self._share_thread and self._open_calls[call.slot]:
                        self._overtake_later(call)
                self._open_calls[call.slot] += 1
                self._queue(call)
        for call, why in refused:
            call.finish(pack_reply(Failure(text=f"slot {call.slot}: {why}")))

    def expire(self, call: SlotCall, after_s: float) -> None:
        """Give up on a call that is not finished: its episode is lost, its thread abandoned."""
        self._give_up(call, f"gave no answer within {after_s:g} s")

    def _share_one_thread(self, slot: int) -> None:
        """Let the slots without an environment live in the thread of this one."""
        if self._share_thread is not None:
            return
        with self._lock:
            self._share_thread = True
            home = self._instances[slot].thread
            for other, instance in self._instances.items():
                if instance.thread.thread is None:
                    self._instances[other] = EnvInstance(self._make_env, home, instance.lost)

    def stats(self) -> dict[str, Any]:
        """Return plain figures; `abandoned` counts the threads that were given up."""
        times = sorted(self._step_times_s)
        return {
            "slots": len(self._instances),
            "busy": sum(count > 0 for count in self._open_calls.values()),
            "lost": [slot for slot, each in self._instances.items() if each.lost is not None],
            "abandoned": self._abandoned,
            "steps": self._steps,
            "step_p50_ms": _percentile_ms(times, 0.50),
            "step_p99_ms": _percentile_ms(times, 0.99),
        }

    def close(self) -> None:
        """Have every environment closed in its thread; `num_open` counts what is left."""
        with self._lock:
            self._closed = True
            for thread in self._threads():
                thread.calls.put(None)

    @property
    def num_open(self) -> int:
        """Threads that still run; abandoned ones are not counted."""
        return sum(each.thread is not None and each.thread.is_alive() for each in self._threads())

    def _threads(self) -> set[SlotThread]:
        return {instance.thread for instance in self._instances.values()}

    def _refusal(self, call: SlotCall) -> str:
        if self._closed:
            return "the pool is closed"
        if call.op in ("reset", "step") and call.episode < self._episodes[call.slot]:
            return f"the slot was reset before this {call.op} began"
        return ""

    def _queue(self, call: SlotCall) -> None:
        """Put a call into the queue of its slot's thread. The lock is held."""
        instance = call.instance = self._instances[call.slot]
        thread = instance.thread
        if thread.thread is None:
            name = "slots" if self._share_thread else f"slot-{call.slot}"
            thread.thread = threading.Thread(
                target=self._serve, args=(thread,), name=name, daemon=True
            )
            thread.thread.start()
        thread.calls.put(call)

    def _overtake_later(self, reset: SlotCall) -> None:
        timer = threading.Timer(_OVERTAKEN_GRACE_S, self._overtake, (reset,))
        timer.daemon = True
        timer.start()

    def _overtake(self, reset: SlotCall) -> None:
        """Give up on what keeps a reset from starting and belongs to an episode before it."""
        instance = reset.instance
        current = None if instance is None or reset.finished else instance.thread.current
        if current is not None and current.episode < reset.episode:
            self._give_up(current, "was still running when the slot was reset")

    def _give_up(self, call: SlotCall, why: str) -> None:
        failure = Failure(
            text=f"slot {call.slot}: {call.op} {why}; the environment is given up, reset the slot "
            "for a new one",
            kind=ErrorKind.TIMEOUT.value,
            retryable=True,
        )
        failed: list[tuple[SlotCall, Failure]] = [(call, failure)]
        with self._lock:
            if call.finished or call.instance is None:
                return
            thread = call.instance.thread
            if not self._share_thread or thread.current is call:
                failed += self._abandon(thread, call, failure)
            else:  # it only waits behind another slot, which has its own limit
                call.instance.retired = True
                self._instances[call.slot] = EnvInstance(self._make_env, thread, failure)
            for each, _ in failed:
                each.finished = True
                self._open_calls[each.slot] -= 1
        for each, reason in failed:
            each.finish(pack_reply(reason))

    def _abandon(
        self, old: SlotThread, stuck: SlotCall, failure: Failure
    ) -> list[tuple[SlotCall, Failure]]:
        """Give up a thread; returns the queued calls that are lost with it. The lock is held."""
        old.abandoned = True
        self._abandoned += 1
        new = SlotThread()
        beside = Failure(
            text=f"the thread of all slots of this worker hangs in slot {stuck.slot}, and every "
            "episode in it is lost; reset the slot for a new one",
            kind=failure.kind,
            retryable=True,
        )
        for slot, instance in self._instances.items():
            if instance.thread is old:
                in_use = instance.in_episode or slot == stuck.slot
                lost = failure if slot == stuck.slot else beside
                self._instances[slot] = EnvInstance(
                    self._make_env, new, lost if in_use else instance.lost
                )
        failed: list[tuple[SlotCall, Failure]] = []
        while (queued := _next_now(old.calls)) is not None:
            if queued.op in ("reset", "make"):  # they start anew anyway
                self._queue(queued)
            else:
                failed.append((queued, self._instances[queued.slot].lost or beside))
        old.calls.put(None)
        if self._closed:
            new.calls.put(None)
        return failed

    def _serve(self, thread: SlotThread) -> None:
        """Run in a slot thread until it is closed or abandoned."""
        while (call := thread.calls.get()) is not None:
            instance = cast("EnvInstance", call.instance)
            if not call.finished:
                thread.current = call
                reply = pack_reply(self._run(instance, call))
                with self._lock:
                    thread.current = None
                    finished, call.finished = call.finished, True
                    if not finished:
                        self._open_calls[call.slot] -= 1
                if not finished:
                    call.finish(reply)
            if thread.abandoned:
                break
            if instance.lost is not None or instance.retired:
                instance.dispose()  # its state is unknown
            if instance.retired:
                thread.instances.discard(instance)
        with self._lock:
            instances = list(thread.instances)
        for instance in instances:
            instance.dispose()
        if thread.abandoned:
            with self._lock:
                self._abandoned -= 1

    def _run(self, instance: EnvInstance, call: SlotCall) -> object:
        if call.incarnation is not None and call.incarnation != self._incarnation:
            return Failure(
                text=f"slot {call.slot}: the episode was lost with its worker process; reset the "
                "slot for a new one",
                retryable=True,
                worker_lost=True,
            )
        if call.op != "step":
            value = instance.run(call.op, call.slot, call.args)
            if instance.is_instant:
                self._share_one_thread(call.slot)
            return value
        started = time.perf_counter()
        value = instance.run("step", call.slot, call.args)
        if not isinstance(value, Failure):
            self._step_times_s.append(time.perf_counter() - started)
            self._steps += 1
        return value


def _next_now(calls: queue.SimpleQueue[SlotCall | None]) -> SlotCall | None:
    try:
        return calls.get_nowait()
    except queue.Empty:
        return None


def _percentile_ms(times_s: list[float], share: float) -> float | None:
    if not times_s:
        return None
    return 1e3 * times_s[min(len(times_s) - 1, int(share * len(times_s)))]
