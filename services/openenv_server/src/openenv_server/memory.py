"""Whose fault a `MemoryError` is.

All sessions of a worker share its memory limit, so the code that meets the limit need not be the
code that used the memory up. What the process uses is known, what a session uses is not: only where
nothing but one session ran can a change be put down to it.
"""

from __future__ import annotations

import resource
import threading

__all__ = ["MemoryShare", "WorkerMemoryError"]

_DATA_FIELD, _SIZE_FIELD = 5, 0
_PAGE = resource.getpagesize()
_LIMITS = ((resource.RLIMIT_DATA, _DATA_FIELD), (resource.RLIMIT_AS, _SIZE_FIELD))

_lock = threading.Lock()
_running = 0
_started = 0


class WorkerMemoryError(RuntimeError):
    """A step met the memory limit of the worker, and nobody can tell that its code used it up.

    It is an error of the server and says nothing about the code. The session lives.
    """


class MemoryShare:
    """What is known of the memory of one session."""

    def __init__(self) -> None:
        self._held = 0
        self._start: tuple[int, int, int | None] = (0, 0, None)
        self._alone = False

    def start_step(self) -> None:
        """Take note of the beginning of a step."""
        global _running, _started
        statm = _statm()
        with _lock:
            _running += 1
            _started += 1
            self._alone = _running == 1
            self._start = (_started, statm[_DATA_FIELD], _free_and_half(statm)[0])

    def end_step(self) -> None:
        """Take note of the end of a step."""
        global _running
        number, used, _ = self._start
        with _lock:
            _running -= 1
            if self._alone and _started == number:
                self._held = max(0, self._held + _statm()[_DATA_FIELD] - used)

    def is_to_blame(self) -> bool:
        """Tell whether this step, in which a `MemoryError` was raised, asked for too much itself.

        True where one allocation asked for more than half of the limit, or the step alone used up
        half, or the session holds half from earlier steps in which it was alone. False where that
        cannot be told. Call it where the error is caught, before anything is let go.
        """
        free, half = _free_and_half(_statm())
        number, _, free_at_start = self._start
        if free is None or half is None or free >= half or self._held >= half:
            return True  # without a limit the request alone was more than the machine can promise
        alone = self._alone and _started == number
        return alone and (free_at_start is None or free_at_start >= half)


def _statm() -> list[int]:
    with open("/proc/self/statm", "rb") as file:
        return [int(part) * _PAGE for part in file.read().split()]


def _free_and_half(statm: list[int]) -> tuple[int | None, int | None]:
    """Bytes the process may still take, and half of what it may take in all."""
    tightest: tuple[int | None, int | None] = (None, None)
    for limit, index in _LIMITS:
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            free = most - statm[index]
            if tightest[0] is None or free < tightest[0]:
                tightest = (free, most // 2)
    return tightest
