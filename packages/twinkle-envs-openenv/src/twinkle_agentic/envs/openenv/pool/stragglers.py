"""Batches that return before their slowest slot, and what arrives later.

Everything here runs on the process-wide background loop, so results keep arriving whichever loop or
thread asked for them.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic.envs.openenv.hop import on_background
from twinkle_agentic.envs.openenv.pool.driver import SlotDriver
from twinkle_agentic.envs.openenv.pool.wire import Failure, SlotRequest, pack_request

__all__ = ["Stragglers"]


class Stragglers:
    """The steps that run on after `first` returned."""

    def __init__(self, driver: SlotDriver) -> None:
        self._driver = driver
        self._batch_of: dict[int, _Batch] = {}  # slot -> the batch its running step belongs to
        self._late: dict[int, Any] = {}  # slot -> a result that was not collected yet
        self._news = asyncio.Event()

    def holds(self, slot: int) -> bool:
        """Whether a result of the slot is still to be collected."""
        return slot in self._batch_of or slot in self._late

    def forget(self, slot: int) -> None:
        """Drop what is still to come from a slot: it is being reset."""
        if self._batch_of.pop(slot, None) or self._late.pop(slot, None):
            background_loop().call_soon_threadsafe(self._news.set)

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
        values: list[Any] = [None] * len(requests)
        groups = self._driver.grouped(requests, values)
        batch = _Batch(values)
        blobs = {
            worker: pack_request([requests[p] for p in positions])
            for worker, positions in groups.items()
        }
        for worker, positions in groups.items():
            for position in positions:
                self._batch_of[requests[position].slot] = batch
            sent = {place: (p, requests[p]) for place, p in enumerate(positions)}
            batch.pumps.add(asyncio.create_task(self._pump(batch, worker, blobs[worker], sent)))
        try:
            await batch.wait_for(min_results)
        except asyncio.CancelledError:  # nobody will see any of it
            for request in requests:
                self.forget(request.slot)
            raise
        batch.returned = True
        return list(batch.values)

    async def _pump(
        self,
        batch: _Batch,
        worker: int,
        blob: bytes,
        sent: dict[int, tuple[int, SlotRequest]],
    ) -> None:
        """Bring in the results of one worker until all are there."""
        method, argument = "begin", blob
        while sent:
            running = [request for _, request in sent.values()]
            try:
                answer = await self._driver.send(worker, method, argument, running)
            except Exception as error:  # Ray is gone, or the worker forgot the batch in a restart
                answer = self._driver.lose(running, error)
            if isinstance(answer, Failure):
                arrived: dict[int, Any] = dict.fromkeys(sent, answer)
            else:
                argument, replies = pickle.loads(answer)
                method = "poll"
                arrived = {
                    place: self._driver.received(worker, sent[place][1], reply)
                    for place, reply in replies.items()
                }
            for place, value in arrived.items():
                position, request = sent.pop(place)
                self._deliver(batch, position, request.slot, value)

    def _deliver(self, batch: _Batch, position: int, slot: int, value: Any) -> None:
        if self._batch_of.get(slot) is batch:
            del self._batch_of[slot]
            if batch.returned:
                self._late[slot] = value
        batch.values[position] = value
        batch.news.set()
        self._news.set()

    async def _collect(self, min_results: int | None, timeout_s: float | None) -> dict[int, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                while self._batch_of and (min_results is None or len(self._late) < min_results):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        late, self._late = self._late, {}
        return late


class _Batch:
    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.returned = False
        self.news = asyncio.Event()
        self.pumps: set[asyncio.Task[None]] = set()

    async def wait_for(self, min_results: int) -> None:
        while sum(value is not None for value in self.values) < min_results:
            self.news.clear()
            await self.news.wait()
