"""Calls into the `e2b` SDK: Ctrl-C ends the wait for them, the exit of the interpreter awaits them.

They block in native code, and the SDK does not work in a process forked from one that used it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError

P = ParamSpec("P")
T = TypeVar("T")

exiting = threading.Event()
"""Set when the interpreter exits: no sandbox is created from then on."""


class InFlight:
    """A count of what runs: `with calls:` counts one more; any thread, nesting allowed."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_until_none(self, timeout_s: float) -> float:
        """Wait until nothing is counted; return the seconds that are left of the limit."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0, timeout=timeout_s)
        return max(0.0, deadline - time.monotonic())


calls = InFlight()
"""Calls into the SDK."""
creations = InFlight()
"""Creations whose sandboxes have no handle yet."""

_threads = ThreadPool(max_threads=64)  # for calls of the main thread
_sdk_used = False
_forked = False


def interruptible(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call that blocks in native code, so that Ctrl-C ends the wait for it at once.

    Signals reach only the main thread, and only in Python code. So the main thread has the call
    made by another thread; an interrupted call goes on there. Any other thread makes it itself.

    Raises:
        SandboxRefusedError: As `check_process`.
    """
    check_process()
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    try:
        future = _threads.submit(function, *args, **kwargs)
    except RuntimeError:  # an interpreter that exits starts no thread
        return function(*args, **kwargs)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            _threads.abandon(future)
        raise


def check_process() -> None:
    """Record that the SDK is used, or refuse where it would hang.

    Raises:
        SandboxRefusedError: This process was forked from one that had used the SDK: the threads
            that do its networking stayed in the parent, and every request would wait for ever.
    """
    global _sdk_used
    if _forked:
        raise SandboxRefusedError(
            f"process {os.getpid()} was forked from one that had used the e2b SDK, which does not "
            "work after a fork: start the workers with 'spawn', or before the first sandbox"
        )
    _sdk_used = True


def _after_fork() -> None:
    global _forked
    _forked = _sdk_used


os.register_at_fork(after_in_child=_after_fork)
