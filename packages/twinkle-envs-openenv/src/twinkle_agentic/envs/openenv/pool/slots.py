"""The slots of one worker: which thread each environment lives in, and what happens when one hangs.

Many libraries demand that an object is made, used and closed in one thread, and a slow environment
must not hold up its neighbours: by default each slot has a lane (a thread and its mailbox) of its
own. A thread that hangs is given up with the environments in it; their slots go on with new ones.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from twinkle_agentic.envs.base import Env
from twinkle_agentic.envs.errors import ErrorKind
from twinkle_agentic.envs.openenv.pool.life import Life
from twinkle_agentic.envs.openenv.pool.wire import Failure, Op, SlotRequest, pack_reply

__all__ = ["SlotCall", "SlotHost"]

_KEPT_STEP_TIMES = 2_048  # per worker, for the percentiles
_OVERTAKEN_GRACE_S = 1.0  # worth waiting for what nearly is done: a new environment costs more


class SlotCall:
    """One call on its way through a slot; `on_done` gets the packed reply once, in any thread."""

    __slots__ = ("args", "episode", "finished", "incarnation", "life", "on_done", "op", "slot")

    def __init__(self, request: SlotRequest, on_done: Callable[[bytes], None]) -> None:
        self.op: Op = request.op
        self.slot = request.slot
        self.args = request.args
        self.incarnation = request.incarnation
        self.episode = request.episode
        self.on_done = on_done
        self.finished = False
        self.life: _LaneLife | None = None


class _Lane:
    """A thread, its mailbox, and the environments that live in it."""

    __slots__ = ("abandoned", "current", "lives", "mailbox", "thread")

    def __init__(self) -> None:
        self.mailbox: queue.SimpleQueue[SlotCall | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.lives: set[_LaneLife] = set()
        self.current: SlotCall | None = None
        self.abandoned = False


class _LaneLife(Life):
    """An environment of a slot and the lane it lives in."""

    __slots__ = ("lane", "retired")

    def __init__(
        self, make_env: Callable[[], Env], lane: _Lane, lost: Failure | None = None
    ) -> None:
        super().__init__(make_env, lost)
        self.lane = lane
        self.retired = False
        lane.lives.add(self)


class SlotHost:
    """Owns the slots `[start, end)`; makes their environments on first use. Thread-safe.

    Args:
        start: First slot.
        end: One past the last slot.
        make_env: Makes an environment; called in the slot's thread.
        slot_threads: Whether each slot has a thread of its own; else all share one.
        incarnation: Tells this life of the process from others; goes into each reply.
    """

    def __init__(
        self,
        start: int,
        end: int,
        make_env: Callable[[], Env],
        *,
        slot_threads: bool = True,
        incarnation: int = 0,
    ) -> None:
        self._make_env = make_env
        self._slot_threads = slot_threads
        self._incarnation = incarnation
        self._lock = threading.Lock()
        self._closed = False
        self._abandoned = 0
        self._steps = 0
        self._step_times_s: deque[float] = deque(maxlen=_KEPT_STEP_TIMES)
        slots = range(start, end)
        shared = _Lane()
        self._lives = {
            slot: _LaneLife(make_env, _Lane() if slot_threads else shared) for slot in slots
        }
        self._open_calls = dict.fromkeys(slots, 0)
        self._episodes = dict.fromkeys(slots, 0)  # of the latest reset, as the driver counts them

    def submit(self, call: SlotCall) -> None:
        """Queue a call; the calls of one slot run in order.

        What a later reset of the slot has overtaken on the way here is refused, and what runs when
        that reset arrives is given up in a moment: nobody waits for it any more.
        """
        with self._lock:
            overtaken = call.op in ("reset", "step") and call.episode < self._episodes[call.slot]
            if not self._closed and not overtaken:
                if call.op == "reset":
                    self._episodes[call.slot] = call.episode
                    if self._slot_threads and self._open_calls[call.slot]:
                        self._overtake_later(call)
                self._open_calls[call.slot] += 1
                self._queue(call)
                return
        call.finished = True
        why = (
            f"the slot was reset before this {call.op} began" if overtaken else "the pool is closed"
        )
        call.on_done(self._packed(Failure(text=f"slot {call.slot}: {why}")))

    def expire(self, call: SlotCall, after_s: float) -> None:
        """Give up on a call that is not finished: its episode is lost, its thread abandoned."""
        self._give_up(call, f"gave no answer within {after_s:g} s")

    def _overtake_later(self, reset: SlotCall) -> None:
        timer = threading.Timer(_OVERTAKEN_GRACE_S, self._overtake, (reset,))
        timer.daemon = True
        timer.start()

    def _overtake(self, reset: SlotCall) -> None:
        """Give up on what keeps a reset from starting and belongs to an episode before it."""
        life = reset.life
        current = None if life is None or reset.finished else life.lane.current
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
            if call.finished or call.life is None:
                return
            lane = call.life.lane
            if self._slot_threads or lane.current is call:
                failed += self._abandon(lane, call, failure)
            else:  # it only waits behind another slot, which has its own limit
                call.life.retired = True
                self._lives[call.slot] = _LaneLife(self._make_env, lane, failure)
            for each, _ in failed:
                each.finished = True
                self._open_calls[each.slot] -= 1
        for each, reason in failed:
            each.on_done(self._packed(reason))

    def stats(self) -> dict[str, Any]:
        """Return plain figures; `abandoned` counts threads that hang in a call nobody waits for."""
        times = sorted(self._step_times_s)
        return {
            "slots": len(self._lives),
            "busy": sum(count > 0 for count in self._open_calls.values()),
            "lost": [slot for slot, life in self._lives.items() if life.lost is not None],
            "abandoned": self._abandoned,
            "steps": self._steps,
            "step_p50_ms": _percentile_ms(times, 0.50),
            "step_p99_ms": _percentile_ms(times, 0.99),
        }

    def close(self) -> None:
        """Have every environment closed in its thread; `num_open` tells how far that is."""
        with self._lock:
            self._closed = True
            for lane in self._lanes():
                lane.mailbox.put(None)

    @property
    def num_open(self) -> int:
        """Threads that still run; abandoned ones are not counted."""
        return sum(lane.thread is not None and lane.thread.is_alive() for lane in self._lanes())

    def _lanes(self) -> set[_Lane]:
        return {life.lane for life in self._lives.values()}

    def _queue(self, call: SlotCall) -> None:
        """Put a call into the mailbox of its slot. The lock is held."""
        call.life = self._lives[call.slot]
        lane = call.life.lane
        if lane.thread is None:
            name = f"slot-{call.slot}" if self._slot_threads else "slots"
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True)
            lane.thread.start()
        lane.mailbox.put(call)

    def _abandon(
        self, old: _Lane, stuck: SlotCall, failure: Failure
    ) -> list[tuple[SlotCall, Failure]]:
        """Give up a lane; returns the queued calls that are lost with it. The lock is held."""
        old.abandoned = True
        self._abandoned += 1
        new = _Lane()
        beside = Failure(
            text=f"the thread of all slots of this worker hangs in slot {stuck.slot}, and every "
            "episode in it is lost; reset the slot for a new one",
            kind=failure.kind,
            retryable=True,
        )
        for slot, life in self._lives.items():
            if life.lane is old:
                in_use = life.in_episode or slot == stuck.slot
                lost = failure if slot == stuck.slot else beside
                self._lives[slot] = _LaneLife(self._make_env, new, lost if in_use else life.lost)
        failed: list[tuple[SlotCall, Failure]] = []
        while (queued := _next_now(old.mailbox)) is not None:
            if queued.op in ("reset", "make"):  # they start anew anyway
                self._queue(queued)
            else:
                failed.append((queued, self._lives[queued.slot].lost or beside))
        old.mailbox.put(None)
        if self._closed:
            new.mailbox.put(None)
        return failed

    def _serve(self, lane: _Lane) -> None:
        """Run in the thread of a lane until it is closed or abandoned."""
        while (call := lane.mailbox.get()) is not None:
            life = cast("_LaneLife", call.life)
            if not call.finished:
                lane.current = call
                reply = self._packed(self._run(life, call))
                with self._lock:
                    lane.current = None
                    finished, call.finished = call.finished, True
                    self._open_calls[call.slot] -= not finished
                if not finished:
                    call.on_done(reply)
            if lane.abandoned:
                break
            if life.lost is not None or life.retired:
                life.dispose()  # its state is unknown
            if life.retired:
                lane.lives.discard(life)
        with self._lock:
            lives = list(lane.lives)
        for life in lives:
            life.dispose()
        if lane.abandoned:
            with self._lock:
                self._abandoned -= 1

    def _run(self, life: _LaneLife, call: SlotCall) -> object:
        if call.incarnation is not None and call.incarnation != self._incarnation:
            return Failure(
                text=f"slot {call.slot}: the episode was lost with its worker process; reset the "
                "slot for a new one",
                retryable=True,
                worker_lost=True,
            )
        started = time.perf_counter()
        value = life.run(call.op, call.slot, call.args)
        if call.op == "step" and not isinstance(value, Failure):
            self._step_times_s.append(time.perf_counter() - started)
            self._steps += 1
        return value

    def _packed(self, value: object) -> bytes:
        return pack_reply(self._incarnation, value)


def _next_now(mailbox: queue.SimpleQueue[SlotCall | None]) -> SlotCall | None:
    try:
        return mailbox.get_nowait()
    except queue.Empty:
        return None


def _percentile_ms(times_s: list[float], share: float) -> float | None:
    if not times_s:
        return None
    return 1e3 * times_s[min(len(times_s) - 1, int(share * len(times_s)))]
