"""Which user of the host the processes of each sandbox are."""

from __future__ import annotations

import os
import secrets

__all__ = ["SandboxUsers"]

# Given to nobody by distributions, nor by systemd or the subordinate ids of containers.
_FIRST = 1_900_000_000
_COUNT = 65_536
_SMALL = 61_000  # in a container whose ids end below


class SandboxUsers:
    """Hands out user ids. Root gives each sandbox its own; anybody else has only their own.

    With users of their own, sandboxes share none of the kernel's per-user limits and cannot signal
    each other even without namespaces.
    """

    def __init__(self, *, may_change: bool) -> None:
        self._used: set[int] = set()
        if not may_change:
            self._first, self._count = os.geteuid(), 1
        elif _mapped(_FIRST + _COUNT):
            self._first, self._count = _FIRST, _COUNT
        else:
            self._first, self._count = _SMALL, 1
        self._next = secrets.randbelow(self._count)

    @property
    def first(self) -> int:
        """The lowest id that is handed out."""
        return self._first

    @property
    def is_current_user(self) -> bool:
        """Whether sandboxes run as this process's own user."""
        return self._first == os.geteuid()

    def take(self) -> int:
        """Return an id; no other sandbox has it while there are enough."""
        for _ in range(self._count):
            uid = self._first + self._next
            self._next = (self._next + 1) % self._count
            if uid not in self._used:
                break
        else:
            uid = self._first
        self._used.add(uid)
        return uid

    def give_back(self, uid: int) -> None:
        """The sandbox with this id has ended."""
        self._used.discard(uid)


def _mapped(uid: int) -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return False
    return any(int(start) <= uid < int(start) + int(count) for start, _, count in lines)
