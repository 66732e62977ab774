"""One event loop in one daemon thread, for the synchronous faces of everything asynchronous.

A thousand sessions share it: they cost one thread, not a thousand.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["background_loop", "run_sync"]

T = TypeVar("T")

_CLEAN_UP_S = 5.0  # how long an interrupted call waits for its coroutine to clean up

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the process-wide loop, started on first use and again in a forked child."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            loop = asyncio.new_event_loop()
            _thread = threading.Thread(
                target=loop.run_forever, name="twinkle-background-loop", daemon=True
            )
            _thread.start()
            _loop = loop
        return _loop


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop and wait for it.

    The coroutine brings its own time limits. Ctrl-C while waiting cancels it, waits for its clean-up (at most 5 s) and goes on as
    `KeyboardInterrupt`. Works in any thread, also in one that runs an event loop (which is blocked
    meanwhile: there, await the async twin instead).

    Raises:
        RuntimeError: Called on the background loop itself, where it would wait for ever.
    """
    if threading.current_thread() is _thread:
        work.close()
        raise RuntimeError("a sync method was called on the background loop: await its async twin")
    ended = threading.Event()
    future = asyncio.run_coroutine_threadsafe(_watched(work, ended), background_loop())
    try:
        return future.result()
    except BaseException:
        if future.cancel():  # interrupted while waiting: let the coroutine close what it opened
            ended.wait(_CLEAN_UP_S)
        raise


async def _watched(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


def _forget_after_fork() -> None:
    global _loop, _thread, _lock
    _loop = _thread = None  # the thread stayed in the parent
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
