"""What the pool asks of its workers, wherever they run."""

from __future__ import annotations

from typing import Any, Protocol

from twinkle_agentic.envs.errors import WorkerLostError

__all__ = ["WorkerGoneError", "Workers"]


class WorkerGoneError(WorkerLostError):
    """The worker is dead for good: no restart will follow."""

    retryable = False


class Workers(Protocol):
    """The workers of one pool; the methods called are those of `PoolWorker`."""

    shards: list[range]

    def call(self, worker: int, request: bytes, timeout_s: float) -> bytes:
        """Send one slot call to a worker and wait for the packed reply.

        Raises:
            EnvTimeoutError: No answer within `timeout_s`.
            WorkerLostError: The process or node of the worker died with the call in flight.
            WorkerGoneError: And it will not come back.
            PoolError: The workers cannot be reached at all.
        """
        ...

    async def acall(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Call a method of one worker and await its answer; raises as `call`."""
        ...

    def recycle(self, worker: int) -> None:
        """Replace the process of a worker that answers nothing; returns at once."""
        ...

    def shut_down(self) -> None:
        """End all workers; calling it again does nothing."""
        ...
