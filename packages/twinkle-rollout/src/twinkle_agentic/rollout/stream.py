"""Finished trajectories one by one, while others are played and new ones are submitted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.rollout._batch import CANCELLATION_S, Batch
from twinkle_agentic.rollout._checks import check_trajectories
from twinkle_agentic.rollout.failures import Coverage
from twinkle_agentic.rollout.types import FinishedTrajectory

__all__ = ["AsyncTrajectoryStream", "TrajectoryStream"]

logger = logging.getLogger(__name__)


class Feed:
    """A batch and the inputs that go into it as there is room; what both streams are made of.

    Args:
        batch: Plays them.
        manager: The tool manager of all; `None` where envs are made.
        trajectories: The inputs.
        hold_open: The batch takes more after the last of them.
    """

    def __init__(
        self, batch: Batch, manager: Any, trajectories: Iterable[Any], *, hold_open: bool
    ) -> None:
        self.batch = batch
        self._manager = manager
        self._inputs: Iterator[Any] | None = iter(trajectories)
        self._hold_open = hold_open
        self._entered = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, trajectory: Any) -> int:
        """Add a trajectory; returns a number for `cancel`."""
        self._loop = asyncio.get_running_loop()
        (given,) = check_trajectories([trajectory])
        return self.batch.submit(given, self._manager)

    def finish(self) -> None:
        """Take no further trajectory but those of the inputs."""
        self._hold_open = False
        if self._inputs is None:
            self.batch.finish()

    def read(self) -> list[Any]:
        """Read as many of the inputs as there is room for."""
        room = self.batch.room
        found: list[Any] = []
        while self._inputs is not None and len(found) < room:
            try:
                found.append(next(self._inputs))
            except StopIteration:
                self._inputs = None
        return found

    async def next(self, inputs: Iterable[Any]) -> tuple[int, FinishedTrajectory | None] | None:
        """Submit what was read, and wait for the next trajectory; as `Batch.next`."""
        if not self._entered and not self._closed:
            self._entered = True
            await self.batch.__aenter__()
        if not self._closed:
            for trajectory in inputs:
                self.submit(trajectory)
            if self._inputs is None and not self._hold_open:
                self.batch.finish()
        ended = await self.batch.next(report_room=self._inputs is not None)
        if ended is not None:
            return ended
        if not self._closed and not self.batch.coverage.complete:
            logger.warning("%s", self.batch.coverage)
        await self.close()
        return None

    async def close(self) -> None:
        """Cancel what runs and wait until all envs are closed. Idempotent."""
        self._closed, self._inputs = True, None
        await self.batch.close()

    def abandon(self) -> None:
        """Close it without waiting, from any thread."""
        loop = self._loop
        if not self._closed and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_close_later, self)


class AsyncTrajectoryStream:
    """Trajectories as they end, by `APIMultiTurnRollout.astream`.

    An async iterator, used once and on one event loop. It ends when the inputs have ended and all
    trajectories are handed out. Leave it early by `aclose` or an `async with` block: what runs is
    cancelled, and all envs are closed. What had ended by then can still be taken.

    At most `concurrency` trajectories are played at once, and none is started while `buffer` of
    them have ended and were not taken, so that a slow consumer is never far behind. Inputs are
    read from their iterable as there is room.

    Example:
        >>> async with rollout.astream(tasks) as stream:
        ...     async for trajectory in stream:
        ...         trainer.add(trajectory)
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    @property
    def coverage(self) -> Coverage:
        """How much of what was asked for so far has come back."""
        return self._feed.batch.coverage

    def submit(self, trajectory: Mapping[str, Any]) -> int:
        """Add a trajectory; it starts when there is room.

        Returns:
            A number for `cancel`.

        Raises:
            TypeError: It is no trajectory.
            RuntimeError: The stream takes no more: open it with `hold_open=True` to add
                trajectories after the inputs have ended, and call `finish` after the last.
        """
        return self._feed.submit(trajectory)

    def cancel(self, number: int) -> bool:
        """Give up a trajectory (all its samples): it is not handed out, and its env is closed.

        Args:
            number: From `submit`; inputs are numbered with them, in their order, from 0.

        Returns:
            Whether it had not ended yet.
        """
        return self._feed.batch.cancel(number)

    def finish(self) -> None:
        """End the stream after all that was submitted; needed with `hold_open` only."""
        self._feed.finish()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FinishedTrajectory:
        """Wait for the next trajectory that ends; a cancellation of the wait loses nothing.

        Raises:
            StopAsyncIteration: After the last.
            RolloutFailedError: A trajectory failed for which `failure_policy` says `fail`.
            TypeError: One of the inputs is no trajectory; the stream is closed.
            Exception: Whatever reading the inputs raised; the stream is closed.
        """
        try:
            while (ended := await self._feed.next(self._feed.read())) is not None:
                if ended[1] is not None:
                    return ended[1]
        except Exception:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel what runs and wait until all envs are closed. Idempotent."""
        await self._feed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._feed.abandon()


class TrajectoryStream:
    """Trajectories as they end, by `APIMultiTurnRollout.stream`: for programs without `async`.

    An iterator, used once, from one thread at a time (`submit`, `cancel` and `finish` may come from
    others). The trajectories are played in the background while the caller does something else. All
    else is as for `AsyncTrajectoryStream`. Leave it early by `close` or a `with` block; Ctrl-C
    while waiting closes it.

    Example:
        >>> for trajectory in rollout.stream(tasks):
        ...     trainer.add(trajectory)
    """

    def __init__(self, feed: Feed, *, close_timeout_s: float) -> None:
        self._feed = feed
        self._clean_up_s = close_timeout_s + CANCELLATION_S

    @property
    def coverage(self) -> Coverage:
        """How much of what was asked for so far has come back."""
        return self._feed.batch.coverage

    def submit(self, trajectory: Mapping[str, Any]) -> int:
        """Add a trajectory; as `AsyncTrajectoryStream.submit`."""
        return run_sync(_call(self._feed.submit, trajectory))

    def cancel(self, number: int) -> bool:
        """Give up a trajectory; as `AsyncTrajectoryStream.cancel`."""
        return run_sync(_call(self._feed.batch.cancel, number))

    def finish(self) -> None:
        """End the stream after all that was submitted; as `AsyncTrajectoryStream.finish`."""
        run_sync(_call(self._feed.finish))

    def close(self) -> None:
        """Cancel what runs and wait until all envs are closed. Idempotent."""
        run_sync(self._feed.close(), clean_up_s=self._clean_up_s)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> FinishedTrajectory:
        """Wait for the next trajectory that ends; as `AsyncTrajectoryStream.__anext__`."""
        try:
            while True:
                inputs = self._feed.read()  # in the caller's thread, for that may block
                ended = run_sync(self._feed.next(inputs), clean_up_s=self._clean_up_s)
                if ended is None:
                    break
                if ended[1] is not None:
                    return ended[1]
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._feed.abandon()


async def _call(function: Any, *args: Any) -> Any:
    return function(*args)


_closing: set[asyncio.Task[None]] = set()  # the event loop holds tasks weakly


def _close_later(feed: Feed) -> None:
    task = asyncio.get_running_loop().create_task(feed.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
