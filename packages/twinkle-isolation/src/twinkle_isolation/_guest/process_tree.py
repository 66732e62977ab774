"""Which processes descend from which, and how to end all of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

__all__ = ["ProcessTree", "children_map", "descendants", "kill_children", "kill_descendants"]

_MAX_ROUNDS = 200
_MAX_STOP_ROUNDS = 20


def _live() -> dict[int, tuple[int, bytes]]:
    """Return parent and start time of every process that `/proc` shows; zombies are left out."""
    found: dict[int, tuple[int, bytes]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                rest = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if rest[0] not in (b"Z", b"X"):
            found[int(name)] = (int(rest[1]), rest[19])
    return found


def children_map() -> dict[int, list[int]]:
    """Return the children of every live process that `/proc` shows."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in _live().items():
        children.setdefault(parent, []).append(pid)
    return children


class ProcessTree:
    """Which program each process of a sandbox came from.

    A process whose parent ends becomes a child of the supervisor, and then the kernel no longer
    knows where it came from. What was seen of it before is remembered here. A process that is
    orphaned between two looks, by a program that goes on, has no known origin.
    """

    def __init__(self) -> None:
        self._origins: dict[int, tuple[bytes, int]] = {}  # pid -> start time, program

    def look(self, programs: Iterable[int], *, adopted_from: int | None = None) -> None:
        """Take note of the processes that there are now.

        Args:
            programs: The process ids of the programs that were started and have not ended.
            adopted_from: A program that has just ended: its are the children of this process that
                have no other origin.
        """
        live, own = _live(), os.getpid()
        origins: dict[int, tuple[bytes, int]] = {pid: (b"", pid) for pid in programs}
        started = dict(origins)
        for pid, (_, start) in live.items():
            known = self._origins.get(pid)
            if pid not in origins and known is not None and known[0] == start:
                origins[pid] = known
        for pid in live:
            chain: list[int] = []
            at = pid
            while at not in origins and at in live and at != own:
                chain.append(at)
                at = live[at][0]
            origin = origins[at][1] if at in origins else adopted_from
            if origin is not None and (at in origins or at == own):
                for member in chain:
                    origins[member] = (live[member][1], origin)
        self._origins = {pid: o for pid, o in origins.items() if pid in live and pid not in started}

    def kill(self, program: int, programs: Iterable[int]) -> None:
        """Kill all that came from a program, without the program itself."""
        programs = list(programs)
        self.look(programs)
        stopped: set[int] = set()
        for _ in range(_MAX_STOP_ROUNDS):
            # Stop first: a process that forks while it is being killed escapes the list.
            new = {pid for pid, (_, origin) in self._origins.items() if origin == program} - stopped
            if not new:
                break
            _signal(new, signal.SIGSTOP)
            stopped |= new
            self.look(programs)
        _signal(stopped, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Return the live processes that descend from `root`, without it."""
    children = children_map()
    found: list[int] = []
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, ())
    return found


def kill_descendants(root: int) -> None:
    """Kill everything that descends from `root`, until nothing is left (at most 200 rounds)."""
    for _ in range(_MAX_ROUNDS):
        pids = descendants(root)
        if not pids:
            return
        _kill(pids)


def kill_children(root: int, *, spare: set[int]) -> None:
    """Kill the children of `root` and their descendants, except those in `spare`."""
    for _ in range(_MAX_ROUNDS):
        pids = [pid for pid in children_map().get(root, ()) if pid not in spare]
        if not pids:
            return
        for pid in pids:
            _kill(descendants(pid))
        _kill(pids)
        with contextlib.suppress(ChildProcessError):
            for pid in pids:
                os.waitpid(pid, os.WNOHANG)


def _kill(pids: list[int]) -> None:
    # Stop first: a process that forks while it is being killed escapes the list.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        _signal(pids, number)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
