"""Control groups, where this process may make them: a second, harder limit."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Literal

from twinkle_isolation.types import Limits

__all__ = ["CgroupLease", "Cgroups"]

_PREFIX = "twinkle"
_REMOVE_TRIES = 50


class CgroupLease:
    """The groups of one sandbox; who joins writes to `fds`, their `cgroup.procs`."""

    def __init__(self, directories: list[Path]) -> None:
        self.directories = directories
        self.fds: list[int] = []
        for directory in directories:
            self.fds.append(os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))

    def close_fds(self) -> None:
        """Close the descriptors; the groups stay."""
        while self.fds:
            os.close(self.fds.pop())

    def memory_kills(self) -> int:
        """Return how many processes the kernel has killed at the memory limit."""
        kills = 0
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):  # v2, v1
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)", (directory / name).read_text(), re.M)
                    kills += int(found[1]) if found else 0
        return kills

    def remove(self) -> None:
        """Remove the groups, once their last process is gone (waits half a second)."""
        self.close_fds()
        for directory in self.directories:
            for _ in range(_REMOVE_TRIES):
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
                else:
                    break


class Cgroups:
    """Make groups for sandboxes. `version` is empty when that is not possible here."""

    def __init__(self) -> None:
        self.version: Literal["", "v1", "v2"] = ""
        self._parents: dict[str, Path] = {}
        self._count = 0
        found: list[tuple[Literal["v1", "v2"], dict[str, Path]]] = [
            ("v1", _find_v1()),
            ("v2", _find_v2()),
        ]
        for version, parents in found:
            without_cpu = {name: path for name, path in parents.items() if name != "cpu"}
            for usable in (parents, without_cpu):
                needed = {"memory", "pids"} <= usable.keys()
                if not self.version and needed and self._usable(usable):
                    self.version, self._parents = version, usable
        self._sweep()

    def make(self, limits: Limits) -> CgroupLease | None:
        """Make the groups of one sandbox; `None` when there are none here.

        A tmpfs belongs to the memory of whoever writes it, so the memory limit includes the disk's.
        In a group of `cpu` a sandbox shares the processors as one process of the host does, however
        many threads it runs.
        """
        if not self.version:
            return None
        self._count += 1
        name = f"{_PREFIX}-{os.getpid()}-{self._count}"
        memory = limits.memory_bytes + limits.disk_bytes + limits.shm_bytes
        directories = sorted({parent / name for parent in self._parents.values()})
        made: list[Path] = []
        try:
            for directory in directories:
                directory.mkdir()
                made.append(directory)
            memory_file = "memory.max" if self.version == "v2" else "memory.limit_in_bytes"
            (self._parents["memory"] / name / memory_file).write_text(str(memory))
            # One for the supervisor, one for the process that forks it.
            (self._parents["pids"] / name / "pids.max").write_text(str(limits.processes + 2))
            with contextlib.suppress(OSError):
                swap = "memory.swap.max" if self.version == "v2" else "memory.memsw.limit_in_bytes"
                value = "0" if self.version == "v2" else str(memory)
                (self._parents["memory"] / name / swap).write_text(value)
            return CgroupLease(directories)
        except OSError:
            for directory in made:
                with contextlib.suppress(OSError):
                    directory.rmdir()
            return None

    def _usable(self, parents: dict[str, Path]) -> bool:
        name = f"{_PREFIX}-{os.getpid()}-0"
        try:
            for directory in sorted({parent / name for parent in parents.values()}):
                directory.mkdir(exist_ok=True)
                usable = (directory / "cgroup.procs").exists()
                for file in ("memory.max", "memory.limit_in_bytes", "pids.max"):
                    path = directory / file
                    if path.exists():
                        path.write_text(path.read_text())
                directory.rmdir()
                if not usable:
                    return False
        except OSError:
            return False
        return True

    def _sweep(self) -> None:
        """Remove the empty groups of servers that were killed."""
        for parent in set(self._parents.values()):
            for directory in parent.glob(f"{_PREFIX}-*-*"):
                pid = directory.name.split("-")[1]
                if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                    with contextlib.suppress(OSError):
                        directory.rmdir()


def _mounts() -> list[tuple[str, str, str, str]]:
    """Return kind, root, mount point and options of the cgroup mounts."""
    found: list[tuple[str, str, str, str]] = []
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            fields, (kind, _, options) = left.split(), right.split()[:3]
            if kind.startswith("cgroup"):
                found.append((kind, fields[3], fields[4], options))
    return found


def _own_paths() -> dict[str, str]:
    """Return this process's group for each controller (the empty name is v2)."""
    paths: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def _directory(root: str, point: str, path: str) -> Path:
    inside = os.path.relpath(path, root) if path.startswith(root) else "."
    return Path(os.path.normpath(os.path.join(point, inside)))


def _find_v1() -> dict[str, Path]:
    own = _own_paths()
    parents: dict[str, Path] = {}
    for kind, root, point, options in _mounts():
        if kind == "cgroup":
            for controller in ("memory", "pids", "cpu"):
                if controller in options.split(",") and controller in own:
                    parents[controller] = _directory(root, point, own[controller])
    return parents


def _find_v2() -> dict[str, Path]:
    own = _own_paths()
    for kind, root, point, _ in _mounts():
        if kind == "cgroup2" and "" in own:
            base = _directory(root, point, own[""])
            try:
                available = (base / "cgroup.controllers").read_text().split()
                if not {"memory", "pids"} <= set(available):
                    continue
                found = ["memory", "pids", *(["cpu"] if "cpu" in available else [])]
                (base / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in found))
            except OSError:
                continue  # not ours, or processes live in this group
            return dict.fromkeys(found, base)
    return {}
