"""Waiting that Ctrl-C and the exit of the interpreter can end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError

__all__ = [
    "check_process",
    "exiting",
    "in_flight",
    "interruptible",
    "pending_creation",
    "wait_for_calls",
    "wait_for_creations",
]

P = ParamSpec("P")
T = TypeVar("T")

exiting = threading.Event()
"""Set when the interpreter exits: nothing new is created from then on."""

_creations = 0
_calls = 0
_changed = threading.Condition()
_helpers = ThreadPool(max_threads=64)  # of the main thread, whose abandoned calls free their place
_sdk_used = False
_forked = False


def interruptible(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call something that blocks outside Python, so that Ctrl-C ends the wait for it at once.

    Signals reach the main thread only, and only in Python code. So there the call is made in
    another thread; it goes on by itself when the wait is interrupted. In any other thread it is a
    plain call.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    try:
        future = _helpers.submit(function, *args, **kwargs)
    except RuntimeError:  # an interpreter that is exiting starts no thread
        return function(*args, **kwargs)
    try:
        return future.result()
    except BaseException:
        if not future.done():
            _helpers.abandon(future)
        raise


def check_process() -> None:
    """Take note that the SDK is used, or refuse where it would hang.

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


@contextmanager
def pending_creation() -> Generator[None, None, None]:
    """Count a creation whose sandbox nobody knows yet."""
    global _creations
    with _changed:
        _creations += 1
    try:
        yield
    finally:
        with _changed:
            _creations -= 1
            _changed.notify_all()


@contextmanager
def in_flight() -> Generator[None, None, None]:
    """Count a call into the SDK; calls nest."""
    global _calls
    with _changed:
        _calls += 1
    try:
        yield
    finally:
        with _changed:
            _calls -= 1
            if not _calls:
                _changed.notify_all()


def wait_for_calls(timeout_s: float) -> None:
    """Wait until no thread is in the SDK."""
    with _changed:
        _changed.wait_for(lambda: _calls == 0, timeout=timeout_s)


def wait_for_creations(timeout_s: float) -> float:
    """Wait until no creation is pending, and return the seconds that are left."""
    begun = time.monotonic()
    with _changed:
        _changed.wait_for(lambda: _creations == 0, timeout=timeout_s)
    return max(0.0, timeout_s - (time.monotonic() - begun))


def _forget_after_fork() -> None:
    global _creations, _calls, _changed, _helpers, _forked
    _forked = _forked or _sdk_used
    _creations = _calls = 0
    _changed = threading.Condition()
    _helpers = ThreadPool(max_threads=64)


os.register_at_fork(after_in_child=_forget_after_fork)
