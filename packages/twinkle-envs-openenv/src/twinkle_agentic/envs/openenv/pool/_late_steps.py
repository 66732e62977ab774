"""Batches that return before their slowest slot, and the results that come later.

The calls run on the process-wide background loop, whichever loop or thread asked for them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic.envs.openenv._background import on_background
from twinkle_agentic.envs.openenv.pool._driver import SlotDriver
from twinkle_agentic.envs.openenv.pool._messages import SlotRequest, failure_of

__all__ = ["LateSteps"]

_Step = asyncio.Task[tuple[int, Any]]  # when it ended, and its value


class LateSteps:
    """The steps that a batch left running, or whose results were not collected."""

    def __init__(self, driver: SlotDriver) -> None:
        self._driver = driver
        self._steps: dict[int, _Step] = {}
        self._ended = itertools.count()

    def __contains__(self, slot: int) -> bool:
        return slot in self._steps

    def forget(self, slot: int) -> None:
        """Drop the late result of a slot: it is being reset."""
        if (step := self._steps.pop(slot, None)) is not None:
            background_loop().call_soon_threadsafe(step.cancel)

    async def first(self, requests: Sequence[SlotRequest], min_results: int) -> list[Any]:
        """Start all requests and return when `min_results` of them are done.

        Returns:
            The values in the order of the requests, `None` where a step still runs.
        """
        return await on_background(self._first(requests, min_results))

    async def collect(self, min_results: int | None, timeout_s: float | None) -> dict[int, Any]:
        """Wait for late results: for `min_results` of them, or all.

        Returns:
            Slot -> value, in the order of arrival; fewer than asked for when the time is up.
        """
        return await on_background(self._collect(min_results, timeout_s))

    async def _first(self, requests: Sequence[SlotRequest], min_results: int) -> list[Any]:
        steps = [asyncio.create_task(self._run(request)) for request in requests]
        running = set(steps)
        try:
            while len(steps) - len(running) < min_results:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for step in steps:
                step.cancel()
            raise
        # Asked again: one may have ended since.
        late = {r.slot: step for r, step in zip(requests, steps, strict=True) if not step.done()}
        self._steps.update(late)
        return [
            None if request.slot in late else step.result()[1]
            for request, step in zip(requests, steps, strict=True)
        ]

    async def _run(self, request: SlotRequest) -> tuple[int, Any]:
        try:
            value = await self._driver.acall(request)
        except Exception as error:  # the pool was closed, or Ray shut down
            value = failure_of(error, f"slot {request.slot}: step")
        return next(self._ended), value

    async def _collect(self, min_results: int | None, timeout_s: float | None) -> dict[int, Any]:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            running = [step for step in list(self._steps.values()) if not step.done()]
            num_done = len(self._steps) - len(running)
            left = None if deadline is None else deadline - loop.time()
            enough = min_results is not None and num_done >= min_results
            if not running or enough or (left is not None and left <= 0):
                break
            await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        done = {slot: step for slot, step in list(self._steps.items()) if step.done()}
        for slot in done:
            self._steps.pop(slot, None)
        kept = {slot: step.result() for slot, step in done.items() if not step.cancelled()}
        return {slot: kept[slot][1] for slot in sorted(kept, key=lambda slot: kept[slot][0])}
