"""Many trajectories at once, each played, written and reported as it ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle_agentic._aio.bounded import bounded, must_propagate
from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.rollout._episode import Plan, play
from twinkle_agentic.rollout._gc import raised_gc_threshold
from twinkle_agentic.rollout.trace import TraceWriter
from twinkle_agentic.rollout.types import FinishedTrajectory

__all__ = ["CANCELLATION_S", "OnDone", "play_all"]

logger = logging.getLogger(__name__)

CANCELLATION_S = 10.0
"""What is under way when Ctrl-C comes gets this long to end, before the envs are closed."""

OnDone = Callable[[dict[str, Any]], Any]
"""Takes a finished trajectory: a short function, or a coroutine function."""

_CALLBACK_S = 120.0  # limit of writing one trace, and of one coroutine of `on_done`
_trace_threads = ThreadPool(4)


async def play_all(
    plan: Plan,
    trajectories: Sequence[Mapping[str, Any]],
    managers: Sequence[Any] | None,
    *,
    concurrency: int,
    traces: TraceWriter | None = None,
    global_step: int | None = None,
    on_done: OnDone | None = None,
) -> list[FinishedTrajectory]:
    """Roll out every trajectory on the running event loop.

    Args:
        plan: What they share.
        trajectories: The inputs.
        managers: A tool manager for each; `None` where the plan makes envs.
        concurrency: Trajectories in flight at once.
        traces: Writes each as it ends.
        global_step: For the names of traces.
        on_done: Called with each as it ends.

    Returns:
        One trajectory per input, in the same order.

    Raises:
        asyncio.CancelledError: The caller was cancelled; all envs are closed by then.
    """
    places = asyncio.Semaphore(concurrency)
    queued = time.monotonic()

    async def one(position: int) -> FinishedTrajectory:
        async with places:
            waited = time.monotonic() - queued
            manager = None if managers is None else managers[position]
            out, raw_replies = await play(plan, trajectories[position], manager)
        out["timing"] = {"queued": waited, **out["timing"]}
        if traces is not None:
            try:
                path, problem = await _write(traces, out, position, global_step, raw_replies)
            except asyncio.CancelledError:
                out["trace_path"], out["trace_error"] = None, "the rollout was cancelled"
                if on_done is not None:  # it has ended, and is kept nowhere else
                    _report_at_once(on_done, out)
                raise
            out["trace_path"] = path
            if problem is not None:
                out["trace_error"] = problem
        if on_done is not None:
            await _report(on_done, out)
        return out

    with raised_gc_threshold():
        return await _all([asyncio.create_task(one(n)) for n in range(len(trajectories))])


async def _all(tasks: list[asyncio.Task[FinishedTrajectory]]) -> list[FinishedTrajectory]:
    """Wait for all; when cancelled, cancel all and wait until they have cleaned up."""
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    return [task.result() for task in tasks]


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
    except TimeoutError:
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
