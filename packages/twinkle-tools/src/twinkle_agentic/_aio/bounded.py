"""Waiting with a limit for foreign code, which may not honour cancellation or may raise anything.

Which exceptions may pass is decided here alone: `_contained` turns what would end or confuse an
event loop (`SystemExit`, a panic of an extension module) into `BlockingCallError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

from twinkle_agentic._aio.mailbox import mailbox_of
from twinkle_agentic._aio.threads import BlockingCallError, current_pool

__all__ = [
    "Deadline",
    "TimeLimitError",
    "bounded",
    "cancel_without_waiting",
    "ended",
    "finish",
    "finish_async",
    "is_cancelled",
    "is_ctrl_c",
    "must_propagate",
]

T = TypeVar("T")

_GRACE_S = 1.0  # what cancelled work gets to clean up before its caller goes on
_cancelled: set[asyncio.Future[Any]] = set()  # the event loop holds tasks weakly


class TimeLimitError(TimeoutError):
    """The limit of `bounded` passed; a `TimeoutError` of another class is the work's own."""


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
    """Await foreign code for a limited time.

    It runs in a task of its own: code that swallows its cancellation does not hold the caller, and
    code that raises `SystemExit` or the like does not stop the event loop.

    Args:
        work: A coroutine or future.
        timeout_s: `None` waits without limit.

    Raises:
        TimeLimitError: The time passed. The work was cancelled, and given a second to clean up.
        BlockingCallError: The work raised something that is no `Exception`, or was cancelled from
            inside.
    """
    task: asyncio.Task[T] = asyncio.ensure_future(_contained(work))
    try:
        await asyncio.wait((task,), timeout=timeout_s)
    except asyncio.CancelledError:
        await _give_up(task)
        raise
    if not task.done():
        await _give_up(task)
        raise TimeLimitError
    if task.cancelled():
        raise BlockingCallError("the call was cancelled from inside")
    try:
        return task.result()
    # asyncio has re-raised a KeyboardInterrupt itself; a GeneratorExit would close this coroutine.
    except (KeyboardInterrupt, GeneratorExit) as error:
        raise _as_blocking_call_error(error) from error


async def ended(call: Future[Any], timeout_s: float) -> None:
    """Wait until a call in a thread has ended, whatever its outcome, for a limited time."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    post = mailbox_of(loop).post

    def notify(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            post(_set_done, over)

    call.add_done_callback(notify)
    await asyncio.wait((over,), timeout=timeout_s)


def finish(result: Any) -> Any:
    """Return a result; an awaitable is run to its end first, on an event loop of its own."""
    if not inspect.isawaitable(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_await(result))
    # This thread runs a loop already, and a second one cannot run inside it.
    return current_pool().submit(lambda: asyncio.run(_await(result))).result()


async def finish_async(result: Any) -> Any:
    """Return a result; an awaitable is awaited first, and so is what that returns.

    Raises:
        BlockingCallError: It raised what would end the event loop; `__cause__` holds it.
        Exception: Whatever else it raised.
    """
    while inspect.isawaitable(result):
        result = await _contained(result)
    return result


def is_cancelled() -> bool:
    """Return whether the running task is being cancelled.

    A `CancelledError` may also come from an awaited object that was cancelled itself.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether an exception is the user's Ctrl-C.

    Ctrl-C arrives in the main thread; in any other thread a `KeyboardInterrupt` is a failure of the
    code that raised it.
    """
    main = threading.current_thread() is threading.main_thread()
    return main and isinstance(error, KeyboardInterrupt)


def must_propagate(error: BaseException) -> bool:
    """Return whether an exception ends the running task: Ctrl-C, or its own cancellation."""
    return is_ctrl_c(error) or is_cancelled()


def cancel_without_waiting(task: asyncio.Future[Any]) -> None:
    """Cancel a task, let it clean up on its own, and discard its exception."""
    task.cancel()
    _cancelled.add(task)
    task.add_done_callback(_discard)


async def _contained(work: Awaitable[T]) -> T:
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise  # GeneratorExit also closes a coroutine that is no longer awaited
    except BaseException as error:
        if is_ctrl_c(error) and not asyncio.isfuture(work):
            raise  # to the caller of the loop; a task in `work` has raised it there already
        raise _as_blocking_call_error(error) from error


def _as_blocking_call_error(error: BaseException) -> BlockingCallError:
    return BlockingCallError(f"the call raised {type(error).__name__}")


async def _give_up(task: asyncio.Task[Any]) -> None:
    cancel_without_waiting(task)
    await asyncio.wait((task,), timeout=_GRACE_S)


def _discard(task: asyncio.Future[Any]) -> None:
    _cancelled.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


def _set_done(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


async def _await(result: Awaitable[Any]) -> Any:
    return await result
