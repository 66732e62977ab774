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

    def start(self, worker: int, method: str, argument: bytes) -> Any:
        """Begin a `call` or a `batch` on one worker; returns what `finish` takes.

        Raises:
            PoolError: The workers cannot be reached at all.
        """
        ...

    def finish(self, worker: int, method: str, begun: Any, timeout_s: float) -> bytes:
        """Wait for the answer to what `start` began.

        Raises:
            EnvTimeoutError: No answer within `timeout_s`.
            WorkerLostError: The process or node of the worker died with the call in flight.
            WorkerGoneError: And it will not come back.
        """
        ...

    async def acall(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Call a method of one worker and await its answer; raises as `start` and `finish`."""
        ...

    def recycle(self, worker: int) -> None:
        """Replace the process of a worker that answers nothing; returns at once."""
        ...

    def shut_down(self) -> None:
        """End all workers; calling it again does nothing."""
        ...
