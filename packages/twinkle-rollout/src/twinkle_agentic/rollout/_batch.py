"""Many trajectories at once, each played, written, reported and handed out as it ends.

A call of a rollout is a batch that is collected; a stream hands the same batch out one by one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self, cast

from twinkle_agentic._aio.bounded import TimeLimitError, bounded, must_propagate
from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.rollout._episode import Plan, play
from twinkle_agentic.rollout.failures import Coverage, RolloutFailedError, RolloutResult
from twinkle_agentic.rollout.trace import TraceWriter
from twinkle_agentic.rollout.types import FinishedTrajectory
from twinkle_agentic.tools.types import user_data_dict

__all__ = ["CANCELLATION_S", "Batch", "OnDone", "collect"]

logger = logging.getLogger(__name__)

CANCELLATION_S = 10.0
"""What is under way when Ctrl-C comes gets this long to end, before the envs are closed."""

OnDone = Callable[[dict[str, Any]], Any]
"""Takes a finished trajectory: a short function, or a coroutine function."""

_CALLBACK_S = 120.0  # limit of writing one trace, and of one coroutine of `on_done`
_MAX_SEED = 2**31 - 1
_trace_threads = ThreadPool(4)


@dataclass(slots=True, kw_only=True, eq=False)
class _Group:
    """The samples of one input that are not all handed out."""

    left: int
    ended: dict[int, FinishedTrajectory] = field(default_factory=dict[int, FinishedTrajectory])


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """One trajectory to play: sample by sample, input by input."""

    number: int
    ticket: int  # of the input
    trajectory: Mapping[str, Any]
    manager: Any
    group: _Group
    submitted: float = field(default_factory=time.monotonic)


class Batch:
    """Trajectories in flight on one event loop; an async context manager that leaves none behind.

    Args:
        plan: What they share.
        group_size: How often each input is played.
        concurrency: Trajectories in flight at once.
        max_ready: Finished trajectories that are not taken, beyond which no further one starts.
        resources: What is held meanwhile, such as connections.
        traces: Writes each trajectory as it ends.
        global_step: For the names of traces.
        on_done: Called with each trajectory as it ends.

    Attributes:
        coverage: Of all that was submitted so far.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group_size: int,
        concurrency: int,
        max_ready: int,
        resources: Sequence[Any] = (),
        traces: TraceWriter | None = None,
        global_step: int | None = None,
        on_done: OnDone | None = None,
    ) -> None:
        self._plan, self.group_size = plan, group_size
        self.concurrency, self.max_ready = concurrency, max_ready
        self._resources, self._stack = resources, AsyncExitStack()
        self._traces, self._global_step, self._on_done = traces, global_step, on_done
        self._queue: deque[_Entry] = deque()
        self._running: dict[asyncio.Task[FinishedTrajectory], _Entry] = {}
        self._ready: deque[tuple[int, FinishedTrajectory]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._numbers = self._tickets = self._held = 0
        self._no_more = self._closed = self._made_room = False
        self._error: BaseException | None = None
        self.coverage = Coverage()

    async def __aenter__(self) -> Self:
        for resource in self._resources:
            if hasattr(resource, "__aenter__"):
                await self._stack.enter_async_context(resource)
            else:
                self._stack.enter_context(resource)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def room(self) -> int:
        """For how many further inputs there is room, those that wait for their start included."""
        outstanding = len(self._queue) + len(self._running) + len(self._ready) + self._held
        return -((outstanding - self.concurrency - self.max_ready) // self.group_size)

    def submit(self, trajectory: Mapping[str, Any], manager: Any = None) -> int:
        """Take a trajectory, to be played when there is room.

        Returns:
            A number for `cancel`.

        Raises:
            RuntimeError: It was said that no more would come, or the batch is closed.
        """
        if self._no_more or self._closed:
            raise RuntimeError("the stream takes no further trajectories")
        ticket, self._tickets = self._tickets, self._tickets + 1
        size = self.group_size
        group = _Group(left=size)
        samples: list[Mapping[str, Any]] = [trajectory]
        if size > 1:
            shared = self._with_seed(trajectory)
            group_id = trajectory.get("group_id", ticket)
            samples = [{**shared, "group_id": group_id, "sample": n} for n in range(size)]
        for sample in samples:
            entry = _Entry(
                number=self._numbers,
                ticket=ticket,
                trajectory=sample,
                manager=manager,
                group=group,
            )
            self._numbers += 1
            self._queue.append(entry)
        self.coverage.asked += size
        self._start_more()
        return ticket

    def finish(self) -> None:
        """Note that no further trajectory will be submitted."""
        self._no_more = True
        self._wake()

    def cancel(self, ticket: int) -> bool:
        """Give up what was submitted under a number; its envs are closed soon.

        Returns:
            Whether any of it was still to be played to its end.
        """
        dropped = [entry for entry in self._queue if entry.ticket == ticket]
        for entry in dropped:
            self._queue.remove(entry)
            self._count_cancelled(entry)
        running = [task for task, entry in self._running.items() if entry.ticket == ticket]
        for task in running:
            task.cancel()
        self._wake()
        return bool(dropped or running)

    async def next(
        self, *, report_room: bool = False
    ) -> tuple[int, FinishedTrajectory | None] | None:
        """Return the next trajectory that has ended, and its number; `None` after the last.

        A cancellation loses nothing.

        Args:
            report_room: Return no trajectory (-1, `None`) when some were cancelled or left out, so
                that there is room for others.

        Raises:
            RolloutFailedError: A trajectory failed for which the policy says `fail`; all others
                are cancelled by then.
        """
        while True:
            if self._error is not None:
                await self.close()
                error, self._error = self._error, None  # once: what had ended can be taken
                raise error
            if self._ready:
                out = self._ready.popleft()
                self._start_more()
                return out
            if report_room and self._made_room:
                self._made_room = False
                return -1, None
            if self._closed or (self._no_more and not self._queue and not self._running):
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def close(self) -> None:
        """Cancel what runs, and wait until its envs are closed. Idempotent."""
        self._closed = True
        for entry in self._queue:
            self._count_cancelled(entry)
        self._queue.clear()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        cancelled = False
        while self._running:
            try:
                await asyncio.wait(list(self._running))
            except asyncio.CancelledError:
                cancelled = True  # raised when all envs are closed; each has limits of its own
        self._wake()
        await self._stack.aclose()
        if cancelled:
            raise asyncio.CancelledError

    def _with_seed(self, trajectory: Mapping[str, Any]) -> dict[str, Any]:
        """Give the envs of a group one seed, where the input has none."""
        shared = dict(trajectory)
        try:
            data = user_data_dict(trajectory)
        except ValueError:
            return shared
        if self._plan.envs is not None and "seed" not in data:
            shared["user_data"] = {**data, "seed": random.SystemRandom().randint(0, _MAX_SEED)}
        return shared

    def _start_more(self) -> None:
        while (
            self._queue
            and len(self._running) < self.concurrency
            and len(self._ready) < self.max_ready
            and not self._closed
        ):
            entry = self._queue.popleft()
            task = asyncio.get_running_loop().create_task(self._play(entry))
            self._running[task] = entry
            task.add_done_callback(self._ended)

    async def _play(self, entry: _Entry) -> FinishedTrajectory:
        waited = time.monotonic() - entry.submitted
        out, raw_replies = await play(self._plan, entry.trajectory, entry.manager)
        out["timing"] = {"queued": waited, **out["timing"]}
        if self._traces is not None:
            try:
                path, problem = await _write(
                    self._traces, out, entry.number, self._global_step, raw_replies
                )
            except asyncio.CancelledError:
                out["trace_path"], out["trace_error"] = None, "the rollout was cancelled"
                if self._on_done is not None:  # it has ended, and is kept nowhere else
                    _report_at_once(self._on_done, out)
                raise
            out["trace_path"] = path
            if problem is not None:
                out["trace_error"] = problem
        if self._on_done is not None:
            await _report(self._on_done, out)
        return out

    def _ended(self, task: asyncio.Task[FinishedTrajectory]) -> None:
        entry = self._running.pop(task)
        if task.cancelled():
            self._count_cancelled(entry)
        elif (error := task.exception()) is not None:
            self._error = self._error or error
        else:
            self._take(entry, task.result())
        self._start_more()
        self._wake()

    def _take(self, entry: _Entry, out: FinishedTrajectory) -> None:
        self.coverage.add(out)
        policy = self._plan.failures
        if policy.action(out) == "fail" and self._error is None:
            self._error = RolloutFailedError(out)
            return
        if not policy.drops:
            self._ready.append((entry.number, out))
            return
        entry.group.ended[entry.number] = out
        self._held += 1
        self._leave_group(entry.group)

    def _count_cancelled(self, entry: _Entry) -> None:
        self.coverage.cancelled += 1
        self._made_room = True
        self._leave_group(entry.group)

    def _leave_group(self, group: _Group) -> None:
        """Decide about a group when all its members have ended."""
        group.left -= 1
        if not self._plan.failures.drops or group.left or not group.ended:
            return
        self._held -= len(group.ended)
        if self._plan.failures.drops_group(group.ended.values()):
            self.coverage.dropped += len(group.ended)
            self._made_room = True
        else:
            self._ready.extend(sorted(group.ended.items()))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def collect(
    batch: Batch, trajectories: Sequence[Mapping[str, Any]], managers: Sequence[Any] | None
) -> RolloutResult:
    """Play trajectories to their end and return them in the order of the inputs.

    Raises:
        RolloutFailedError: A trajectory failed for which the policy says `fail`.
        asyncio.CancelledError: The caller was cancelled; all envs are closed by then.
    """
    ended: list[tuple[int, FinishedTrajectory]] = []
    async with batch:
        for position, trajectory in enumerate(trajectories):
            batch.submit(trajectory, None if managers is None else managers[position])
        batch.finish()
        while (out := await batch.next()) is not None:
            ended.append(cast("tuple[int, FinishedTrajectory]", out))
    if not batch.coverage.complete:
        logger.warning("%s", batch.coverage)
    ended.sort(key=lambda out: out[0])
    return RolloutResult((out for _, out in ended), batch.coverage)


async def _write(
    traces: TraceWriter,
    out: FinishedTrajectory,
    position: int,
    step: int | None,
    raw_replies: list[dict[str, Any]],
) -> tuple[str | None, str | None]:
    record: Any = out
    writing = _trace_threads.run(
        traces.write, record, position=position, global_step=step, raw_replies=raw_replies
    )
    try:
        return await bounded(writing, _CALLBACK_S)
    except TimeLimitError:
        logger.warning("the trace of trajectory %d took too long", position)
        return None, f"not written within {_CALLBACK_S:g} s"


def _report_at_once(on_done: OnDone, out: Any) -> None:
    if inspect.iscoroutinefunction(on_done):
        return  # it would delay the cancellation
    try:
        on_done(out)
    except Exception:
        logger.exception("on_done failed")


async def _report(on_done: OnDone, out: Any) -> None:
    try:
        answer = on_done(out)
        if inspect.isawaitable(answer):
            await bounded(answer, _CALLBACK_S)
    except BaseException as error:
        if must_propagate(error):
            raise
        logger.exception("on_done failed")
