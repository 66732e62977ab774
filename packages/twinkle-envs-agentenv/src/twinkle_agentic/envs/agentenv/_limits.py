"""How many sandboxes a process creates, and how many commands it runs, at once per server."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from twinkle_agentic.envs.errors import SandboxUnavailableError


class ConcurrencyLimiter:
    """Admits callers in the order they came, each under a limit of its own. Thread-safe.

    Args:
        advice: What to do when no place becomes free in time, for the message.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Event]] = deque()
        self.running = 0

    @contextmanager
    def place(self, limit: int, *, timeout_s: float) -> Generator[None, None, None]:
        """Hold a place while the body runs; wait while `limit` or more are held.

        Raises:
            SandboxUnavailableError: No place became free within `timeout_s` seconds.
        """
        waiter = (limit, threading.Event())
        with self._lock:
            self._waiting.append(waiter)
            self._admit()
        try:
            if not waiter[1].wait(timeout_s):
                raise SandboxUnavailableError(
                    f"none of {limit} places of this process came free within {timeout_s:g} s: "
                    f"{self._advice}"
                )
            yield
        finally:
            with self._lock:
                if waiter[1].is_set():
                    self.running -= 1
                else:
                    self._waiting.remove(waiter)
                self._admit()

    def _admit(self) -> None:
        while self._waiting and self.running < self._waiting[0][0]:
            self.running += 1
            self._waiting.popleft()[1].set()


_ADVICE = {
    "creations": "raise max_concurrent_creates or queue_timeout_s",
    # A command holds a connection, of which the SDK opens a limited number. One that waited inside
    # the SDK would use up its time limit before it started.
    "commands": "set E2B_MAX_CONNECTIONS before the trainer starts, run fewer commands at once, or "
    "raise queue_timeout_s",
}
_limiters: dict[tuple[str, str], ConcurrencyLimiter] = {}


def limiter_of(address: str, what: Literal["creations", "commands"]) -> ConcurrencyLimiter:
    """Return the limiter of creations or commands on a server, the same for the whole process."""
    return _limiters.setdefault((address, what), ConcurrencyLimiter(_ADVICE[what]))
