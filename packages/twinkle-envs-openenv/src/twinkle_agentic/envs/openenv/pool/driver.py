"""The driver's side of slot calls: routing, limits, and what is known of each episode.

What went wrong with an environment or its worker comes back as a `Failure`, never as an exception.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_agentic.envs.errors import EnvTimeoutError, ErrorKind, WorkerLostError
from twinkle_agentic.envs.openenv.pool.wire import (
    Failure,
    SlotRequest,
    pack_request,
    unpack_reply,
)
from twinkle_agentic.envs.openenv.pool.workers import WorkerGoneError, Workers

__all__ = ["SlotDriver"]

_GRACE_S = 5.0  # beyond the limit the worker enforces itself; longer means its interpreter is stuck
_RETRY_PAUSE_S = 0.2  # between attempts to reach a worker that is being restarted


@dataclass(slots=True, eq=False)
class _Sending:
    """Requests on their way to one worker."""

    worker: int
    method: str
    argument: bytes
    requests: Sequence[SlotRequest]
    begun: Any = None


class SlotDriver:
    """Sends slot calls to their owners. Thread-safe; one caller per slot at a time."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.lost: dict[int, Failure] = {}  # episodes known to be gone, until the next reset
        self.episodes: dict[int, int] = {}  # slot -> incarnation of the worker that started it
        self.restarts = [0] * len(workers.shards)
        self._shard_size = len(workers.shards[0])
        self._incarnations: list[int | None] = [None] * len(workers.shards)
        self._numbers: dict[int, int] = {}  # slot -> how many resets were asked for
        self._down: set[int] = set()

    def owner(self, slot: int) -> int:
        """Return the worker that holds a slot."""
        return slot // self._shard_size

    def next_episode(self, slot: int) -> int:
        """Count a reset: whatever was asked in a slot before it tells nothing of it any more."""
        number = self._numbers[slot] = self.episode_of(slot) + 1
        return number

    def episode_of(self, slot: int) -> int:
        """Return the number of the latest episode of a slot; 0 before the first."""
        return self._numbers.get(slot, 0)

    def call(self, request: SlotRequest) -> Any:
        """Run one slot call and wait for it.

        Returns:
            A `StepResult`, a `Failure`, or what the op gives.

        Raises:
            TypeError: The arguments cannot be pickled.
            PoolError: The workers cannot be reached at all.
        """
        if (known := self.known_failure(request)) is not None:
            return known
        worker = self.owner(request.slot)
        sending = _Sending(worker, "call", pack_request(request), [request])
        sending.begun = self.workers.start(worker, "call", sending.argument)
        reply = self._finished(sending)
        return reply if isinstance(reply, Failure) else self.received(worker, request, reply)

    async def acall(self, request: SlotRequest) -> Any:
        """Run one slot call and await it; as `call`."""
        if (known := self.known_failure(request)) is not None:
            return known
        worker = self.owner(request.slot)
        reply = await self.send(worker, "call", pack_request(request), [request])
        return reply if isinstance(reply, Failure) else self.received(worker, request, reply)

    def batch(self, requests: Sequence[SlotRequest]) -> list[Any]:
        """Run calls of many slots, one RPC per worker; returns the values in their order."""
        values: list[Any] = [None] * len(requests)
        groups = self.grouped(requests, values)
        sendings = self._sendings(requests, groups)
        open_ones = dict(zip(sendings, groups.values(), strict=True))
        try:
            for sending in sendings:
                sending.begun = self.workers.start(sending.worker, "batch", sending.argument)
            for sending in sendings:
                self._fill_in(values, open_ones.pop(sending), sending, self._finished(sending))
        except BaseException:  # interrupted: nobody will see the other answers
            for sending in open_ones:
                self._give_up(sending.requests)
            raise
        return values

    async def abatch(self, requests: Sequence[SlotRequest]) -> list[Any]:
        """Run calls of many slots without blocking the event loop; as `batch`."""
        values: list[Any] = [None] * len(requests)
        groups = self.grouped(requests, values)
        sendings = self._sendings(requests, groups)
        answers = await asyncio.gather(
            *(self.send(s.worker, "batch", s.argument, s.requests) for s in sendings)
        )
        for sending, positions, answer in zip(sendings, groups.values(), answers, strict=True):
            self._fill_in(values, positions, sending, answer)
        return values

    def grouped(self, requests: Sequence[SlotRequest], values: list[Any]) -> dict[int, list[int]]:
        """Sort positions of requests by worker; put into `values` what is known without asking."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for position, request in enumerate(requests):
            if (known := self.known_failure(request)) is not None:
                values[position] = known
            else:
                groups[self.owner(request.slot)].append(position)
        return dict(groups)

    def _sendings(
        self, requests: Sequence[SlotRequest], groups: Mapping[int, list[int]]
    ) -> list[_Sending]:
        # All are pickled before any is sent: bad arguments must not leave half a batch running.
        sendings: list[_Sending] = []
        for worker, positions in groups.items():
            group = [requests[position] for position in positions]
            sendings.append(_Sending(worker, "batch", pack_request(group), group))
        return sendings

    def _fill_in(
        self, values: list[Any], positions: list[int], sending: _Sending, answer: Any
    ) -> None:
        if isinstance(answer, Failure):
            for position in positions:
                values[position] = answer
            return
        replies: list[bytes] = pickle.loads(answer)
        for position, request, reply in zip(positions, sending.requests, replies, strict=True):
            values[position] = self.received(sending.worker, request, reply)

    def _finished(self, sending: _Sending) -> Any:
        """Wait for an answer; a reset is sent again until its worker is back."""
        worker, method, requests = sending.worker, sending.method, sending.requests
        deadline = time.monotonic() + max(r.timeout_s for r in requests) + _GRACE_S
        try:
            while True:
                try:
                    return self.workers.finish(worker, method, sending.begun, _left(deadline))
                except (EnvTimeoutError, WorkerLostError) as error:
                    if not self._may_retry(worker, requests[0], error, deadline):
                        return self.lose(requests, error)
                time.sleep(_RETRY_PAUSE_S)
                sending.begun = self.workers.start(worker, method, sending.argument)
        except (KeyboardInterrupt, SystemExit):
            self._give_up(requests)
            raise

    async def send(
        self, worker: int, method: str, argument: Any, requests: Sequence[SlotRequest]
    ) -> Any:
        """Send requests to one worker; a reset is sent again until its worker is back.

        Returns:
            The answer, or a `Failure` that holds for all of the requests.
        """
        deadline = time.monotonic() + max(r.timeout_s for r in requests) + _GRACE_S
        try:
            while True:
                try:
                    return await self.workers.acall(worker, method, argument, _left(deadline))
                except (EnvTimeoutError, WorkerLostError) as error:
                    if not self._may_retry(worker, requests[0], error, deadline):
                        return self.lose(requests, error)
                await asyncio.sleep(_RETRY_PAUSE_S)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            self._give_up(requests)
            raise

    def received(self, worker: int, request: SlotRequest, reply: bytes) -> Any:
        """Read the reply of one call and take note of what it says about the episode."""
        incarnation, value = unpack_reply(reply)
        self.note_incarnation(worker, incarnation)
        if request.episode != self.episode_of(request.slot):
            return value  # of a step that was still running when its slot was reset
        if not isinstance(value, Failure):
            if request.op == "reset":
                self.lost.pop(request.slot, None)
                self.episodes[request.slot] = incarnation
        elif (
            request.op in ("reset", "step") or value.worker_lost or value.kind == ErrorKind.TIMEOUT
        ):
            self.lost[request.slot] = value
        return value

    def lose(self, requests: Sequence[SlotRequest], error: Exception) -> Failure:
        """Take note that the episodes of these slots are gone, and why."""
        if isinstance(error, EnvTimeoutError):
            failure = Failure(text=str(error), kind=error.kind.value, retryable=True)
        else:
            failure = Failure(
                text=str(error), retryable=not isinstance(error, WorkerGoneError), worker_lost=True
            )
        self._note_lost(requests, failure)
        return failure

    def note_incarnation(self, worker: int, incarnation: int) -> None:
        """Count a restart where the worker's process is another one than before."""
        if incarnation < 0:  # an unreadable reply
            return
        self._down.discard(worker)
        known = self._incarnations[worker]
        if known != incarnation:
            self._incarnations[worker] = incarnation
            self.restarts[worker] += known is not None

    def lost_slots(self, worker: int) -> set[int]:
        """Return the slots of a worker whose episode is gone, as far as the driver knows."""
        living = self._incarnations[worker]
        return {
            slot
            for slot in self.workers.shards[worker]
            if slot in self.lost or self.episodes.get(slot, living) != living
        }

    def known_failure(self, request: SlotRequest) -> Failure | None:
        """Return why a call need not be sent: the episode of its slot is known to be gone."""
        return None if request.op == "reset" else self.lost.get(request.slot)

    def _note_lost(self, requests: Sequence[SlotRequest], failure: Failure) -> None:
        for request in requests:
            if request.episode == self.episode_of(request.slot):
                self.lost[request.slot] = failure

    def _may_retry(
        self, worker: int, request: SlotRequest, error: Exception, deadline: float
    ) -> bool:
        if isinstance(error, EnvTimeoutError):
            if worker not in self._down:  # else it is only slow to come back
                self.workers.recycle(worker)
            return False
        self._down.add(worker)
        return (
            request.op == "reset"
            and not isinstance(error, WorkerGoneError)
            and time.monotonic() + _RETRY_PAUSE_S < deadline
        )

    def _give_up(self, requests: Sequence[SlotRequest]) -> None:
        for request in requests:
            failure = Failure(
                text=f"slot {request.slot}: the caller gave up on a running {request.op}, so the "
                "state of the episode is unknown; reset the slot for a new one",
                kind=ErrorKind.TIMEOUT.value,
                retryable=True,
            )
            self._note_lost([request], failure)


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
