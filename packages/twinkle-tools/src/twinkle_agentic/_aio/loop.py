"""One event loop in one daemon thread, for the synchronous APIs of everything asynchronous.

A thousand sessions share it: they cost one thread, not a thousand.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

__all__ = ["BackgroundCall", "background_call", "background_loop", "run_sync"]

T = TypeVar("T")

_SIGNAL_CHECK_S = 0.5
_CLEAN_UP_S = 5.0  # how long an interrupted call waits for its coroutine to clean up

# Reentrant: a finalizer that runs while it is held may need the loop, too.
_lock = threading.RLock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the process-wide loop, started on first use."""
    global _loop, _thread
    with _lock:
        if _loop is not None and _is_served():
            return _loop
        loop = _new_loop()
        if _loop is not None and _is_served():  # made meanwhile, for a finalizer
            loop.close()
            return _loop
        thread = threading.Thread(
            target=_serve, args=(loop,), name="twinkle-background-loop", daemon=True
        )
        thread.start()
        _loop, _thread = loop, thread
        return loop


def run_sync(work: Coroutine[Any, Any, T], *, clean_up_s: float | None = None) -> T:
    """Run a coroutine on the background loop and wait for it.

    The coroutine brings its own time limits. Ctrl-C while waiting cancels it, waits for its
    clean-up and goes on as `KeyboardInterrupt`. Works in any thread, also in one that runs an event
    loop (which is blocked meanwhile: there, await the async twin instead).

    Args:
        work: The coroutine.
        clean_up_s: Seconds an interrupted call waits for the coroutine to end; 5 by default.

    Raises:
        RuntimeError: Called on the background loop itself, where it would wait for ever.
        BaseException: Whatever the coroutine raises, `SystemExit` included; it concerns this caller
            alone.
    """
    call = background_call(work)
    try:
        call.start()
        # In slices: a signal that arrives just before an endless wait would never be handled.
        while not call.ended.wait(_SIGNAL_CHECK_S):
            pass
    except BaseException:  # interrupted while waiting: let the coroutine close what it opened
        call.interrupt(_CLEAN_UP_S if clean_up_s is None else clean_up_s)
        raise
    try:
        return call.result()
    finally:
        # The exception's traceback keeps this frame, so the frame must not keep the exception.
        del call, work


def background_call(
    work: Coroutine[Any, Any, T], on_end: Callable[[], object] | None = None
) -> BackgroundCall[T]:
    """Prepare a coroutine for the background loop; start it where Ctrl-C is handled.

    Args:
        work: The coroutine.
        on_end: Called on the loop when it has ended.

    Raises:
        RuntimeError: Called on the background loop itself, where waiting for it would never end.
    """
    if threading.current_thread() is _thread:
        work.close()
        raise RuntimeError("a sync method was called on the background loop: await its async twin")
    return BackgroundCall(background_loop(), work, on_end)


class BackgroundCall(Generic[T]):
    """A coroutine on the background loop.

    Attributes:
        ended: Set when it has ended, or was cancelled before its start.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T],
        on_end: Callable[[], object] | None,
    ) -> None:
        self.ended = threading.Event()
        self._loop = loop
        self._on_end = on_end
        self._work: Coroutine[Any, Any, T] | None = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        """Start it; called once."""
        self._loop.call_soon_threadsafe(self._start)

    def interrupt(self, clean_up_s: float) -> None:
        """Cancel it, and wait for its clean-up for a limited time."""
        self._loop.call_soon_threadsafe(self._cancel)
        self.ended.wait(clean_up_s)

    def result(self) -> T:
        """Return the result of a call that has ended, once; raises what it raised."""
        task, self._task = self._task, None
        assert task is not None
        try:
            return task.result()
        finally:
            del task

    def _start(self) -> None:
        if self._work is None:
            return
        self._task, self._work = self._loop.create_task(self._work), None
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            # It may not end in time; the interpreter that exits meanwhile need not report that.
            self._task._log_destroy_pending = False  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            self._task.cancel()
        elif self._work is not None:
            self._work.close()
            self._work = None
            self.ended.set()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # an interrupted caller does not ask for it
        self.ended.set()
        if self._on_end is not None:
            self._on_end()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # an extra: a fifth less CPU per turn of a rollout
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _is_served() -> bool:
    return _thread is not None and _thread.is_alive()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            # Some coroutine raised it. Its own caller gets it; all others need the loop.
            logger.debug("a coroutine on the background loop raised %r", error)
