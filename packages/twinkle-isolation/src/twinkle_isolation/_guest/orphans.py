"""Find and kill processes by descent, for sandboxes without a pid namespace."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["children_map", "descendants", "kill_children", "kill_descendants"]

_MAX_ROUNDS = 200


def children_map() -> dict[int, list[int]]:
    """Return the children of every process that `/proc` shows; zombies are left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                rest = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if rest[0] not in (b"Z", b"X"):
            children.setdefault(int(rest[1]), []).append(int(name))
    return children


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
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
