"""The slots of one worker: each environment lives in a thread of its own.

Many libraries demand that an object is made, used and closed in one thread, and a slow environment
must not hold up its neighbours. A thread that hangs is given up together with its environment; the
slot goes on with a new one.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import ErrorKind
from twinkle_agentic.envs.openenv.pool.wire import Failure, Op, SlotRequest, failure_of, pack_reply

logger = logging.getLogger(__name__)

__all__ = ["SlotCall", "SlotHost"]

_KEPT_STEP_TIMES = 2_048  # per worker, for the percentiles


class SlotCall:
    """One call on its way through a slot; `on_done` gets the packed reply once, in any thread."""

    __slots__ = ("args", "finished", "incarnation", "on_done", "op", "slot")

    def __init__(self, request: SlotRequest, on_done: Callable[[bytes], None]) -> None:
        self.op: Op = request.op
        self.slot = request.slot
        self.args = request.args
        self.incarnation = request.incarnation
        self.on_done = on_done
        self.finished = False


class SlotHost:
    """Owns the slots `[start, end)`; makes their environments on first use. Thread-safe.

    Args:
        start: First slot.
        end: One past the last slot.
        make_env: Makes an environment; called in the slot's thread.
        incarnation: Tells this life of the process from others; goes into each reply.
    """

    def __init__(
        self,
        start: int,
        end: int,
        make_env: Callable[[], Env],
        *,
        incarnation: int = 0,
    ) -> None:
        self.make_env = make_env
        self.incarnation = incarnation
        self.step_times_s: deque[float] = deque(maxlen=_KEPT_STEP_TIMES)
        self._slots = {slot: _Slot(slot, self) for slot in range(start, end)}

    def submit(self, call: SlotCall) -> None:
        """Queue a call; the calls of one slot run in order."""
        self._slots[call.slot].submit(call)

    def expire(self, call: SlotCall, after_s: float) -> None:
        """Give up on a call that is not finished: its episode is lost, its thread abandoned."""
        self._slots[call.slot].expire(call, after_s)

    def stats(self) -> dict[str, Any]:
        """Return plain figures; `abandoned` counts threads that hang in a call nobody waits for."""
        slots = list(self._slots.values())
        times = sorted(self.step_times_s)
        return {
            "slots": len(slots),
            "busy": sum(slot.busy for slot in slots),
            "lost": [slot.index for slot in slots if slot.lost],
            "abandoned": sum(slot.abandoned for slot in slots),
            "steps": sum(slot.steps for slot in slots),
            "step_p50_ms": _percentile_ms(times, 0.50),
            "step_p99_ms": _percentile_ms(times, 0.99),
        }

    def close(self) -> None:
        """Have every environment closed in its thread; `num_open` tells how far that is."""
        for slot in self._slots.values():
            slot.close()

    @property
    def num_open(self) -> int:
        """Threads of slots that still run; abandoned ones are not counted."""
        return sum(slot.is_open for slot in self._slots.values())


class _Life:
    """One environment with its thread: what is lost together when a call hangs."""

    __slots__ = ("abandoned", "env", "in_episode", "lost", "mailbox", "return_so_far", "thread")

    def __init__(self, lost: Failure | None = None) -> None:
        self.env: Env | None = None
        self.thread: threading.Thread | None = None
        self.mailbox: queue.SimpleQueue[SlotCall | None] = queue.SimpleQueue()
        self.in_episode = False
        self.return_so_far = 0.0
        self.lost = lost
        self.abandoned = False


class _Slot:
    def __init__(self, index: int, host: SlotHost) -> None:
        self.index = index
        self.steps = 0
        self.abandoned = 0
        self._host = host
        self._lock = threading.Lock()
        self._life = _Life()
        self._open_calls = 0
        self._closed = False

    @property
    def busy(self) -> bool:
        return self._open_calls > 0

    @property
    def lost(self) -> bool:
        return self._life.lost is not None

    def submit(self, call: SlotCall) -> None:
        with self._lock:
            if not self._closed:
                life = self._life
                if life.thread is None:
                    life.thread = threading.Thread(
                        target=self._serve, args=(life,), name=f"slot-{self.index}", daemon=True
                    )
                    life.thread.start()
                self._open_calls += 1
                life.mailbox.put(call)
                return
        call.finished = True
        call.on_done(self._packed(Failure(text=f"slot {self.index}: the pool is closed")))

    def expire(self, call: SlotCall, after_s: float) -> None:
        failure = Failure(
            text=f"slot {self.index}: {call.op} gave no answer within {after_s:g} s; the "
            "environment is given up, reset the slot for a new one",
            kind=ErrorKind.TIMEOUT.value,
            retryable=True,
        )
        stranded: list[SlotCall] = []
        with self._lock:
            if call.finished:
                return
            old = self._life
            self._life = _Life(lost=failure)
            old.abandoned = True
            self.abandoned += 1
            while (queued := _next_now(old.mailbox)) is not None:
                stranded.append(queued)
            old.mailbox.put(None)
            for each in {call, *stranded}:
                each.finished = True
            self._open_calls = 0
        packed = self._packed(failure)
        for each in {call, *stranded}:
            each.on_done(packed)

    @property
    def is_open(self) -> bool:
        thread = self._life.thread
        return thread is not None and thread.is_alive()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._life.mailbox.put(None)

    def _serve(self, life: _Life) -> None:
        """Run in the slot's thread until the life ends."""
        while (call := life.mailbox.get()) is not None:
            if not call.finished:
                reply = self._packed(self._run(life, call))
                with self._lock:
                    finished, call.finished = call.finished, True
                    self._open_calls -= not finished
                if not finished:
                    call.on_done(reply)
            if life.abandoned:
                break
            if life.env is not None and life.lost is not None:
                self._dispose(life)  # it raised: its state is unknown
        self._dispose(life)
        if life.abandoned:
            with self._lock:
                self.abandoned -= 1

    def _run(self, life: _Life, call: SlotCall) -> object:
        if call.incarnation is not None and call.incarnation != self._host.incarnation:
            return Failure(
                text=f"slot {self.index}: the episode was lost with its worker process; reset the "
                "slot for a new one",
                retryable=True,
                worker_lost=True,
            )
        if life.lost is not None and call.op != "reset":
            return life.lost
        try:
            if call.op == "step":
                return self._step(life, *call.args)
            if call.op == "reset":
                return self._reset(life, *call.args)
            if call.op == "make":
                env = self._made(life)
                return {"tools": _tools_or_none(env), "scores": _scores(env)}
            return getattr(self._made(life), call.op)(*call.args[0], **call.args[1])
        except BaseException as error:
            failure = failure_of(error, f"slot {self.index}: {call.op}")
            if call.op in ("step", "reset"):
                life.in_episode = False
                life.lost = failure
            return failure

    def _made(self, life: _Life) -> Env:
        if life.env is None:
            life.env = self._host.make_env()
        return life.env

    def _reset(self, life: _Life, trajectory: Any, want_tools: bool) -> object:
        life.in_episode = False
        if life.lost is not None:
            self._dispose(life)
        life.lost = None
        env = self._made(life)
        result = _checked(env.reset(trajectory), "reset")
        life.in_episode = True
        life.return_so_far = 0.0
        return (result, _tools_or_none(env)) if want_tools else result

    def _step(self, life: _Life, tool_name: str, arguments: dict[str, Any]) -> object:
        if not life.in_episode or life.env is None:
            return Failure(text=f"slot {self.index}: no episode is running; reset the slot first")
        started = time.perf_counter()
        result = _checked(life.env.step(tool_name, arguments), "step")
        self._host.step_times_s.append(time.perf_counter() - started)
        self.steps += 1
        if "episode_reward" not in result.info:
            if result.error is None:
                life.return_so_far += result.reward
            result.info["episode_reward"] = life.return_so_far
        return result

    def _dispose(self, life: _Life) -> None:
        env, life.env = life.env, None
        if env is None:
            return
        try:
            env.close()
        except BaseException as error:
            logger.warning("slot %d: closing the environment failed: %r", self.index, error)

    def _packed(self, value: object) -> bytes:
        return pack_reply(self._host.incarnation, value)


def _checked(result: Any, op: str) -> StepResult:
    """Take what an env returned for a result, so that no wrong number passes as a reward."""
    info: Any
    try:
        observation, reward = result.observation, result.reward
        done, info = result.done, result.info
    except AttributeError:
        raise TypeError(f"{op} must return a StepResult, found {result!r}") from None
    if type(reward) is float and math.isfinite(reward) and type(info) is dict:
        details = dict(cast("dict[str, Any]", info))
        return StepResult(str(observation), reward, bool(done), details)
    details = dict(cast("dict[str, Any]", info or {}))
    return StepResult.scored(str(observation), reward, done=bool(done), info=details)


def _tools_or_none(env: Env) -> list[Any] | None:
    try:
        return list(env.tools())
    except Exception:  # asked again, and reported, when somebody needs them
        return None


def _scores(env: Env) -> bool:
    """Tell whether an env scores trajectories itself."""
    return type(env).evaluate is not Env.evaluate


def _next_now(mailbox: queue.SimpleQueue[SlotCall | None]) -> SlotCall | None:
    try:
        return mailbox.get_nowait()
    except queue.Empty:
        return None


def _percentile_ms(times_s: list[float], share: float) -> float | None:
    if not times_s:
        return None
    return 1e3 * times_s[min(len(times_s) - 1, int(share * len(times_s)))]
