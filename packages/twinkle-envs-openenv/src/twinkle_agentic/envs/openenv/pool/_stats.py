"""Figures of a running pool."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

from twinkle_agentic.envs.errors import TwinkleEnvError
from twinkle_agentic.envs.openenv.pool._driver import SlotDriver

__all__ = ["WorkerStats", "collect_stats"]

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker at one moment.

    Attributes:
        worker: Its number.
        start: Its first slot.
        end: One past its last slot.
        alive: It answered within 5 s; where it did not, the figures below `restarts` are zero.
        pid: Its process; `None` where it did not answer.
        slots: How many it holds.
        lost: Slots whose episode is lost until their next `reset`.
        restarts: How often its process was restarted, as far as its replies say.
        busy: Slots with a call running.
        abandoned: Threads that hang in a call that was given up.
        steps: Steps since its process started.
        step_p50_ms: Median step time of the last 2,048 steps; `None` before the first.
        step_p99_ms: 99th percentile of the same.
    """

    worker: int
    start: int
    end: int
    alive: bool
    pid: int | None = None
    slots: int
    lost: int
    restarts: int
    busy: int = 0
    abandoned: int = 0
    steps: int = 0
    step_p50_ms: float | None = None
    step_p99_ms: float | None = None


async def collect_stats(driver: SlotDriver) -> list[WorkerStats]:
    """Ask all workers at once, at most 5 s."""
    return list(
        await asyncio.gather(
            *(_worker_stats(driver, worker) for worker in range(len(driver.backend.shards)))
        )
    )


async def _worker_stats(driver: SlotDriver, worker: int) -> WorkerStats:
    shard = driver.backend.shards[worker]
    figures: dict[str, Any] = {}
    try:
        figures = pickle.loads(await driver.backend.acall(worker, "stats", None, _TIMEOUT_S))
    except TwinkleEnvError:
        lost = set(shard) & set(
            driver.episodes.incarnations
        )  # with a dead worker, all its episodes are gone
    else:
        driver.note_worker_restart(worker, figures.pop("incarnation"))
        lost = set(figures.pop("lost", []))
    lost |= driver.lost_slots(worker)
    return WorkerStats(
        worker=worker,
        start=shard.start,
        end=shard.stop,
        alive=bool(figures),
        lost=len(lost),
        restarts=driver.restarts[worker],
        **{"slots": len(shard), **figures},
    )
