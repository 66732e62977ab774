"""How many sandboxes a process creates, and how many commands it runs, at once per server."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from twinkle_agentic.envs.errors import SandboxUnavailableError

__all__ = ["Gate", "command_gate", "create_gate"]


@dataclass(eq=False)
class _Waiter:
    limit: int
    go: threading.Event = field(default_factory=threading.Event)


class Gate:
    """Lets callers pass, first come first served, each under the limit it brings.

    Thread-safe. Two envs with different limits share the gate: one passes while fewer are inside
    than its own limit.

    Args:
        advice: What to do when none comes free, for the message.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self.running = 0
        self.most = 0
        """The most that were in flight at once."""

    @contextmanager
    def pass_through(self, limit: int, *, timeout_s: float) -> Generator[None, None, None]:
        """Hold a place while the body runs.

        Raises:
            SandboxUnavailableError: None came free within `timeout_s` seconds.
        """
        self._enter(limit, timeout_s)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, limit: int, timeout_s: float) -> None:
        with self._lock:
            if not self._waiting and self.running < limit:
                self._start()
                return
            waiter = _Waiter(limit)
            self._waiting.append(waiter)
        try:
            passed = waiter.go.wait(timeout_s)
        except BaseException:
            self._give_up(waiter)
            raise
        if not passed and not self._give_up(waiter, keep=True):
            raise SandboxUnavailableError(
                f"none of {limit} places of this process came free within {timeout_s:g} s: "
                f"{self._advice}"
            )

    def _give_up(self, waiter: _Waiter, *, keep: bool = False) -> bool:
        """Leave the queue; return whether the place had been given and is kept."""
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                return False
        if not keep:
            self._leave()
        return keep

    def _leave(self) -> None:
        with self._lock:
            self.running -= 1
            while self._waiting and self.running < self._waiting[0].limit:
                waiter = self._waiting.popleft()
                self._start()
                waiter.go.set()

    def _start(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)


_gates: dict[tuple[str, str], Gate] = {}
_gates_lock = threading.Lock()


def create_gate(address: str) -> Gate:
    """Return the gate for creations on a server, the same for the whole process."""
    with _gates_lock:
        return _gates.setdefault(
            (address, "create"), Gate("raise max_concurrent_creates or queue_timeout_s")
        )


def command_gate(address: str) -> Gate:
    """Return the gate for commands on a server, the same for the whole process.

    A running command holds a connection, of which the SDK opens a limited number. One that waited
    inside the SDK would use up its time limit before it began.
    """
    with _gates_lock:
        return _gates.setdefault(
            (address, "command"),
            Gate(
                "set E2B_MAX_CONNECTIONS before the trainer starts, run fewer commands at once, or "
                "raise queue_timeout_s"
            ),
        )


def _forget_after_fork() -> None:
    global _gates_lock
    _gates_lock = threading.Lock()
    _gates.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
