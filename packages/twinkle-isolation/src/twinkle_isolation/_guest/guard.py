"""Watch what a sandbox uses, where the kernel does not limit the sum itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from twinkle_isolation._guest import process_tree

__all__ = ["INTERVAL_S", "DiskWatch", "Guard"]

INTERVAL_S = 0.1
"""Between two looks of a `Guard`, while programs run."""

_DISK_INTERVAL_S = 0.5
_MAX_ENTRIES = 200_000
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class DiskWatch:
    """Count what lies below a directory, at most twice a second; for sandboxes without a tmpfs."""

    def __init__(self, directory: str, limit_bytes: int) -> None:
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._used = 0
        self._next = 0.0

    def over(self, more: int = 0) -> bool:
        """Return whether the files, and `more` bytes that come to them, are over the limit."""
        now = time.monotonic()
        if now >= self._next:
            self._used = self._count()
            # A large tree takes long to count: spend a tenth of the time on it.
            self._next = now + max(_DISK_INTERVAL_S, 10 * (time.monotonic() - now))
        self._used += more
        return self._used > self.limit_bytes

    def _count(self) -> int:
        total = entries = 0
        todo = [self.directory]
        while todo:
            with contextlib.suppress(OSError), os.scandir(todo.pop()) as found:
                for entry in found:
                    entries += 1
                    with contextlib.suppress(OSError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
            if entries > _MAX_ENTRIES:
                return self.limit_bytes + 1
        return total


class Guard:
    """Hold the limits on the sum over all processes of one sandbox.

    RLIMIT_DATA bounds each process and acts at once; this bounds their sum, ten times a second.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        processes: int,
        namespaces: bool,
        disk: DiskWatch | None,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.namespaces = namespaces
        self.disk = disk

    def pids(self) -> list[int]:
        """Return the sandbox's processes, without the supervisor."""
        own = os.getpid()
        if not self.namespaces:
            return process_tree.descendants(own)
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]

    def memory(self, pids: list[int]) -> int:
        """Return the bytes of anonymous and shared memory that the processes use."""
        return sum(map(_proportional, pids))

    def cpu(self, pids: list[int]) -> float:
        """Return the processor time of the processes, ended ones included, in seconds."""
        ended = os.times()
        return ended.children_user + ended.children_system + sum(map(_cpu, pids))

    def check(self) -> tuple[bool, dict[int, str]]:
        """Look once, and kill what is too much.

        Returns:
            Whether there are processes at all, and the sessions of the killed ones (the process id
            of the command they came from) with the reason (`disk`, `memory`, `processes`).
        """
        pids = self.pids()
        killed: dict[int, str] = {}
        if len(pids) > self.processes:
            # Which of them is the bomb cannot be told.
            killed = dict.fromkeys(pids, "processes")
        elif pids and self.disk is not None and self.disk.over():
            killed = dict.fromkeys(pids, "disk")
        elif sum(map(_resident, pids)) > self.memory_bytes:
            sizes = {pid: _proportional(pid) for pid in pids}
            total = sum(sizes.values())
            if total > self.memory_bytes * 1.5:
                killed = dict.fromkeys(pids, "memory")
            elif total > self.memory_bytes:
                killed = {max(sizes, key=lambda pid: sizes[pid]): "memory"}
        sessions: dict[int, str] = {}
        for pid, reason in killed.items():
            with contextlib.suppress(ProcessLookupError):
                sessions[os.getsid(pid)] = reason
        if len(killed) == len(pids) and killed and self.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids), sessions


def _resident(pid: int) -> int:
    """Return an upper bound of what the process uses: shared pages count in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _cpu(pid: int) -> float:
    """Return the processor time of a process and its ended children."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    except (OSError, IndexError):
        return 0.0


def _proportional(pid: int) -> int:
    """Return the process's anonymous and shared memory, divided among those who share it."""
    total = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    except (OSError, IndexError):
        return 0
    return total
