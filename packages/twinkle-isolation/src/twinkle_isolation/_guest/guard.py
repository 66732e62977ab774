"""Watch what a sandbox uses, where the kernel does not limit the sum itself."""

from __future__ import annotations

import contextlib
import os
import signal

from twinkle_isolation._guest import orphans

__all__ = ["INTERVAL_S", "Guard"]

INTERVAL_S = 0.1
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Guard:
    """Hold the limits on the sum over all processes of one sandbox.

    RLIMIT_DATA bounds each process and acts at once; this bounds their sum, ten times a second.
    """

    def __init__(self, *, memory_bytes: int, processes: int, namespaces: bool) -> None:
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.namespaces = namespaces

    def pids(self) -> list[int]:
        """Return the sandbox's processes, without the supervisor."""
        own = os.getpid()
        if not self.namespaces:
            return orphans.descendants(own)
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]

    def memory(self, pids: list[int]) -> int:
        """Return the bytes of anonymous and shared memory that the processes use."""
        return sum(map(_proportional, pids))

    def check(self) -> tuple[bool, dict[int, str]]:
        """Look once, and kill what is too much.

        Returns:
            Whether there are processes at all, and the killed ones with the reason (`memory`,
            `processes`).
        """
        pids = self.pids()
        killed: dict[int, str] = {}
        if len(pids) > self.processes:
            # Which of them is the bomb cannot be told.
            killed = dict.fromkeys(pids, "processes")
        elif sum(map(_resident, pids)) > self.memory_bytes:
            sizes = {pid: _proportional(pid) for pid in pids}
            total = sum(sizes.values())
            if total > self.memory_bytes * 1.5:
                killed = dict.fromkeys(pids, "memory")
            elif total > self.memory_bytes:
                killed = {max(sizes, key=lambda pid: sizes[pid]): "memory"}
        if len(killed) == len(pids) and killed and self.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids), killed


def _resident(pid: int) -> int:
    """Return an upper bound of what the process uses: shared pages count in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


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
