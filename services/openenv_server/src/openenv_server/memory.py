"""Whose fault a `MemoryError` is.

All sessions of a worker share its memory limit, so the code that meets the limit need not be the
code that used the memory up.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import time
import traceback
import types
from collections.abc import Iterable
from typing import Any, cast

from openenv_server.guard import is_own

__all__ = ["WorkerMemoryError", "is_to_blame", "release", "return_large_blocks"]

_PAGE_BYTES = resource.getpagesize()
_LIMITS = ((resource.RLIMIT_DATA, 5), (resource.RLIMIT_AS, 0))  # and their fields in statm
_LOOK_S = 2.0  # a session with millions of objects holds up the worker no longer
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**20


class WorkerMemoryError(RuntimeError):
    """A step met the memory limit of the worker, and nobody can tell that its code used it up.

    It is an error of the server and says nothing about the code. The session lives.
    """


def is_to_blame(error: BaseException, variables: object) -> bool:
    """Tell whether a session that met a `MemoryError` asked for too much itself.

    True where it asked for more than half of the limit at once, or where what it holds, in
    `variables` and in the functions that were running, is more than half. Otherwise it is not, or
    it cannot be told.
    """
    free, half = _free_and_half()
    if free >= half:
        return True
    roots = [variables]
    trace = error.__traceback__
    while trace is not None:
        roots += trace.tb_frame.f_locals.values()
        trace = trace.tb_next
    try:
        return _hold(roots, half)
    except MemoryError:  # not even room to look
        return False


def release(error: BaseException) -> None:
    """Let go of what the frames held that an exception passed through.

    The interpreter's frames and its exceptions hold each other, so all that the code had at hand
    would stay until the next garbage collection, and count against the limit of every session.
    """
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        traceback.clear_frames(found.__traceback__)
        found.__traceback__ = None
        todo += [found.__context__, found.__cause__]
        if isinstance(found, BaseExceptionGroup):
            todo += cast("BaseExceptionGroup[BaseException]", found).exceptions


def return_large_blocks() -> None:
    """Have the process give large blocks of memory back as soon as they are freed.

    Else the C library may keep them, and they count against the limit of the worker.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _free_and_half() -> tuple[float, float]:
    """Bytes the process may still take, and half of what it may take in all."""
    tightest = (float("inf"), float("inf"))
    with open("/proc/self/statm", "rb") as file:
        used = [int(pages) * _PAGE_BYTES for pages in file.read().split()]
    for limit, field in _LIMITS:
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            tightest = min(tightest, (most - used[field], most / 2))
    return tightest


def _hold(roots: Iterable[Any], enough: float) -> bool:
    """Tell whether what can be reached is so many bytes."""
    until = time.monotonic() + _LOOK_S
    seen: set[int] = set()
    todo = list(roots)
    total = 0
    while todo:
        found: Any = todo.pop()
        if id(found) in seen or isinstance(found, type | types.ModuleType | types.FrameType):
            continue
        seen.add(id(found))
        if isinstance(found, types.FunctionType):  # its globals are the server's
            todo += found.__closure__ or ()
            continue
        # The class of an own object may have a `__sizeof__` of its own.
        total += object.__sizeof__(found) if is_own(found) else sys.getsizeof(found)
        if total >= enough:
            return True
        if len(seen) % 1000 == 0 and time.monotonic() > until:
            return False
        todo += gc.get_referents(found)
    return False
