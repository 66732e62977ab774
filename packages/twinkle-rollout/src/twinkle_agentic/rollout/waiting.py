"""Waiting with a bound, also for code that does not honour cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

from twinkle_agentic.tools.coroutines import is_ctrl_c
from twinkle_agentic.tools.mailbox import mailbox_of
from twinkle_agentic.tools.outcome import describe_error
from twinkle_agentic.tools.threads import BlockingCallError

__all__ = ["Deadline", "bounded", "ended"]

T = TypeVar("T")

_GRACE_S = 1.0  # what cancelled work gets to clean up before its caller goes on


class Deadline:
    """A point in time, or none.

    Args:
        seconds: From now; `None` never comes.
    """

    def __init__(self, seconds: float | None) -> None:
        self.at = None if seconds is None else time.monotonic() + seconds

    def left_s(self) -> float | None:
        """Return the seconds left, at least 0; `None` for no deadline."""
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether the time is over."""
        return self.at is not None and time.monotonic() >= self.at

    def postpone(self, seconds: float) -> None:
        """Move it by a time that does not count."""
        if self.at is not None:
            self.at += seconds

    def cap_s(self, limit_s: float | None) -> float | None:
        """Return the nearer of a limit and the deadline, in seconds from now."""
        left = self.left_s()
        if left is None:
            return limit_s
        return left if limit_s is None else min(limit_s, left)


async def bounded(work: Awaitable[T], timeout_s: float | None) -> T:
    """Await other people's code for a limited time.

    It runs in a task of its own: code that swallows its cancellation does not hold the caller, and
    code that raises `SystemExit` or the like does not stop the event loop.

    Args:
        work: A coroutine or future.
        timeout_s: `None` waits without limit.

    Raises:
        TimeoutError: The time passed. The work was cancelled, and given a second to clean up.
        BlockingCallError: The work raised something that is no `Exception` (`SystemExit`, a panic
            of an extension module), or was cancelled from inside.
    """
    task: asyncio.Task[T] = asyncio.ensure_future(_contained(work))
    try:
        await asyncio.wait((task,), timeout=timeout_s)
    except asyncio.CancelledError:
        await _give_up(task)
        raise
    if not task.done():
        await _give_up(task)
        raise TimeoutError
    if task.cancelled():
        raise BlockingCallError("the call was cancelled from inside")
    try:
        return task.result()
    # Whoever runs the loop has the first already, and the second would seem to end us.
    except (KeyboardInterrupt, GeneratorExit) as error:
        raise _contained_error(error) from error


async def ended(call: Future[Any], timeout_s: float) -> None:
    """Wait until a call in a thread has ended, however it did, for a limited time."""
    over = asyncio.get_running_loop().create_future()
    post = mailbox_of(asyncio.get_running_loop()).post

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            post(_end, over)

    call.add_done_callback(tell)
    await asyncio.wait((over,), timeout=timeout_s)


def _end(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


async def _contained(work: Awaitable[T]) -> T:
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise  # the last one also ends a coroutine that nobody awaits any more
    except BaseException as error:
        if is_ctrl_c(error) and not asyncio.isfuture(work):
            raise  # through this task to whoever runs the loop; a task in `work` did so itself
        raise _contained_error(error) from error


def _contained_error(error: BaseException) -> BlockingCallError:
    return BlockingCallError(f"the call raised {describe_error(error)}")


async def _give_up(task: asyncio.Task[Any]) -> None:
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait((task,), timeout=_GRACE_S)


def _forget(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # taken, so that nobody logs it as never retrieved
