"""Pools that are still open when the interpreter exits are closed first."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

__all__ = ["close_at_exit"]


class _Closable(Protocol):
    def close(self) -> None: ...


_open_pools: weakref.WeakSet[_Closable] = weakref.WeakSet()
_registered_in = 0


def close_at_exit(pool: _Closable) -> None:
    """Close a pool at exit if it still exists then.

    Exit handlers run last in, first out: registered after Ray's own, this one finds Ray still
    running.
    """
    global _registered_in
    _open_pools.add(pool)
    if _registered_in != os.getpid():
        atexit.register(_close_all)
        _registered_in = os.getpid()


def _close_all() -> None:
    if _registered_in != os.getpid():  # a forked child does not own its parent's pools
        return
    for pool in list(_open_pools):
        with contextlib.suppress(Exception):
            pool.close()
