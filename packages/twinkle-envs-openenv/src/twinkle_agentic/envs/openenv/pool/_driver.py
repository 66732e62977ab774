"""The driver's side of slot calls: to the worker of each slot and back, within limits.

What goes wrong with an environment or its worker comes back as a `Failure`, never as an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import EnvTimeoutError, ErrorKind, WorkerLostError
from twinkle_agentic.envs.openenv.pool._episodes import Episodes
from twinkle_agentic.envs.openenv.pool._local_backend import LocalBackend
from twinkle_agentic.envs.openenv.pool._messages import (
    Failure,
    SlotRequest,
    pack_requests,
    unpack_replies,
    value_or_raise,
)
from twinkle_agentic.envs.openenv.pool._ray_backend import RayBackend, WorkerDeadError
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["FirstEnv", "SlotDriver"]

_GRACE_S = 5.0  # beyond the limit the worker enforces itself; longer means its interpreter is stuck
_RETRY_PAUSE_S = 0.2  # between attempts to reach a worker that is being restarted


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEnv:
    """What the first environment of a pool says of itself.

    Attributes:
        tools: Its tool definitions; `None` where it has none before a reset.
        scores: Whether its class overrides `evaluate`.
    """

    tools: list[Any] | None
    scores: bool


@dataclass(slots=True, eq=False)
class _Message:
    """The requests of one call for one worker, and where their values belong."""

    worker: int
    requests: list[SlotRequest] = field(default_factory=list[SlotRequest])
    positions: list[int] = field(default_factory=list[int])
    blob: bytes = b""
    pending: Any = None


class SlotDriver:
    """Sends slot calls to their workers. Thread-safe; one caller per slot at a time.

    Attributes:
        episodes: Of all slots.
        first_env: What the first environment says of itself.
        restarts: Of each worker's process.
    """

    def __init__(
        self, backend: LocalBackend | RayBackend, first_env: FirstEnv, episodes: Episodes
    ) -> None:
        self.backend = backend
        self.first_env = first_env
        self.episodes = episodes
        self.restarts = [0] * len(backend.shards)
        self._shard_size = len(backend.shards[0])
        self._incarnations: list[int | None] = [None] * len(backend.shards)
        self._down: set[int] = set()

    def tools(self, slot: int | None) -> list[ToolInfo]:
        """Return the tool definitions of a slot; those of the first environment before its reset.

        Raises:
            TwinkleEnvError: The environment raised, did not answer in time, or is lost.
        """
        first = self.first_env.tools
        if first is not None and (slot is None or slot not in self.episodes.incarnations):
            return list(first)
        request = self.episodes.request("tools", slot or 0, (), {})
        return list(value_or_raise(self.call(request)))

    def call(self, request: SlotRequest) -> Any:
        """Run one slot call and wait for it; returns and raises as `run`."""
        return self.run([request])[0]

    async def acall(self, request: SlotRequest) -> Any:
        """Run one slot call and await it; returns and raises as `run`."""
        return (await self.arun([request]))[0]

    def run(self, requests: Sequence[SlotRequest]) -> list[Any]:
        """Run slot calls side by side, one message per worker, and wait for all.

        Returns:
            For each a `StepResult`, a `Failure`, or what the op gives.

        Raises:
            TypeError: The arguments cannot be pickled; then nothing was sent.
            PoolError: The workers cannot be reached at all.
        """
        values: list[Any] = [None] * len(requests)
        messages = self._messages(requests, values)
        missing = list(messages)
        try:
            for message in messages:
                message.pending = self.backend.send(message.worker, message.blob)
            for message in messages:
                self._read(message, self._received(message), values)
                missing.remove(message)
        except BaseException:  # interrupted: the other answers will not be read
            self._give_up(missing)
            raise
        return values

    async def arun(self, requests: Sequence[SlotRequest]) -> list[Any]:
        """Run slot calls side by side without blocking the event loop; as `run`."""
        values: list[Any] = [None] * len(requests)
        messages = self._messages(requests, values)
        if len(messages) == 1:  # without a task of its own
            answers = [await self._exchange(messages[0])]
        else:
            answers = await asyncio.gather(*map(self._exchange, messages))
        for message, answer in zip(messages, answers, strict=True):
            self._read(message, answer, values)
        return values

    def note_worker_restart(self, worker: int, incarnation: int) -> None:
        """Count a restart where the worker's process is another one than before."""
        self._down.discard(worker)
        known = self._incarnations[worker]
        if known != incarnation:
            self._incarnations[worker] = incarnation
            self.restarts[worker] += known is not None

    def lost_slots(self, worker: int) -> set[int]:
        """Return the slots of a worker whose episode is lost, as far as the driver knows."""
        current = self._incarnations[worker]
        return {
            slot
            for slot in self.backend.shards[worker]
            if slot in self.episodes.lost
            or self.episodes.incarnations.get(slot, current) != current
        }

    def _messages(self, requests: Sequence[SlotRequest], values: list[Any]) -> list[_Message]:
        """Sort requests by worker; put into `values` what is known without asking."""
        messages: dict[int, _Message] = {}
        lost = self.episodes.lost
        for position, request in enumerate(requests):
            if lost and request.op != "reset" and request.slot in lost:
                values[position] = lost[request.slot]
                continue
            worker = request.slot // self._shard_size
            message = messages.get(worker)
            if message is None:
                message = messages[worker] = _Message(worker)
            message.requests.append(request)
            message.positions.append(position)
        # All are pickled before any is sent: bad arguments must not leave half a batch running.
        for message in messages.values():
            message.blob = pack_requests(message.requests)
        return list(messages.values())

    def _received(self, message: _Message) -> bytes | Failure:
        """Wait for an answer; a reset is sent again until its worker is back."""
        worker, deadline = message.worker, _deadline(message)
        while True:
            try:
                return self.backend.receive(worker, message.pending, _left(deadline))
            except (EnvTimeoutError, WorkerLostError) as error:
                if not self._may_retry(message, error, deadline):
                    return self._lose(message, error)
            time.sleep(_RETRY_PAUSE_S)
            message.pending = self.backend.send(worker, message.blob)

    async def _exchange(self, message: _Message) -> bytes | Failure:
        """Send a message and await its answer; a reset is sent again until its worker is back."""
        worker, deadline = message.worker, _deadline(message)
        try:
            while True:
                try:
                    return await self.backend.acall(worker, "run", message.blob, _left(deadline))
                except (EnvTimeoutError, WorkerLostError) as error:
                    if not self._may_retry(message, error, deadline):
                        return self._lose(message, error)
                await asyncio.sleep(_RETRY_PAUSE_S)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            self._give_up([message])
            raise

    def _read(self, message: _Message, answer: bytes | Failure, values: list[Any]) -> None:
        """Take note of what the replies say about the episodes."""
        if isinstance(answer, Failure):
            for position in message.positions:
                values[position] = answer
            return
        incarnation, replies = unpack_replies(answer)
        self.note_worker_restart(message.worker, incarnation)
        for position, request, value in zip(
            message.positions, message.requests, replies, strict=True
        ):
            values[position] = value
            if type(value) is not StepResult or request.op != "step":
                self.episodes.note(request, value, incarnation)

    def _lose(self, message: _Message, error: Exception) -> Failure:
        """Take note that the episodes of these slots are lost, and why."""
        timeout = isinstance(error, EnvTimeoutError)
        failure = Failure(
            text=str(error),
            kind=(error.kind if timeout else ErrorKind.ENV).value,
            retryable=not isinstance(error, WorkerDeadError),
            worker_lost=not timeout,
        )
        for request in message.requests:
            self.episodes.note_lost(request, failure)
        return failure

    def _may_retry(self, message: _Message, error: Exception, deadline: float) -> bool:
        if isinstance(error, EnvTimeoutError):
            if message.worker not in self._down:  # else it is only slow to come back
                self.backend.recycle(message.worker)
            return False
        self._down.add(message.worker)
        return (
            message.requests[0].op == "reset"
            and not isinstance(error, WorkerDeadError)
            and time.monotonic() + _RETRY_PAUSE_S < deadline
        )

    def _give_up(self, messages: Sequence[_Message]) -> None:
        for request in (request for message in messages for request in message.requests):
            failure = Failure(
                text=f"slot {request.slot}: the caller gave up on a running {request.op}, so the "
                "state of the episode is unknown; reset the slot for a new one",
                kind=ErrorKind.TIMEOUT.value,
                retryable=True,
            )
            self.episodes.note_lost(request, failure)


def _deadline(message: _Message) -> float:
    return time.monotonic() + max(r.timeout_s for r in message.requests) + _GRACE_S


def _left(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())
