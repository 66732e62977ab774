"""Fewer collections while a rollout runs: the objects of its episodes live until it ends."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator

__all__ = ["raised_gc_threshold"]

# New containers before Python looks for cycles among them. Episodes in flight are hundreds of
# thousands of containers in no cycle, and at Python's 700 going through them again and again takes
# 40 % of the time of a large batch, at 50,000 a tenth. What a cycle of a tool holds waits for as
# many.
_NEW_OBJECTS = 50_000

_lock = threading.Lock()
_holders = 0
_before: tuple[int, int, int] | None = None  # of the process, where it was changed


@contextlib.contextmanager
def raised_gc_threshold() -> Generator[None]:
    """Raise the first threshold of `gc` for a block; the last of several blocks restores it.

    A threshold that is higher, or 0 (collection turned off), stays, and so does one that was set
    within the block.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _holders, _before
    with _lock:
        _holders += 1
        found = gc.get_threshold()
        if _holders == 1 and 0 < found[0] < _NEW_OBJECTS:
            _before = found
            gc.set_threshold(_NEW_OBJECTS, *found[1:])


def _leave() -> None:
    global _holders, _before
    with _lock:
        _holders -= 1
        if _holders == 0 and _before is not None:
            if gc.get_threshold() == (_NEW_OBJECTS, *_before[1:]):
                gc.set_threshold(*_before)
            _before = None
