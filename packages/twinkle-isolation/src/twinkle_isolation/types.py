"""Plain data: what a sandbox is limited to, what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "DirEntry",
    "EndReason",
    "ExecResult",
    "IsolationInfo",
    "IsolationMode",
    "Limits",
    "ProcessEnd",
    "SandboxSpec",
    "Usage",
    "WatchEvent",
]

IsolationMode = Literal["bubblewrap", "process"]
EndReason = Literal["timeout", "output", "memory", "processes", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use.

    Attributes:
        memory_bytes: Private memory: a hard limit for each process (RLIMIT_DATA), and for the sum
            over all processes by a cgroup where one is writable, else by a watch ten times a
            second that kills the largest process.
        processes: Processes and threads at once.
        disk_bytes: Files written. With isolation `bubblewrap` the size of a tmpfs, so it is
            memory of the host too; with `process` a watch that kills what writes more.
        shm_bytes: `/dev/shm` (isolation `bubblewrap`). System V memory, semaphores and messages are
            refused where no cgroup counts them.
        file_bytes: The longest single file. `None`: no limit with `bubblewrap`, `disk_bytes` with
            `process`.
        open_files: Open file descriptors of each process. Without a cgroup, where nobody counts the
            kernel's memory behind them, at most one per 32 KiB of a process's share of
            `memory_bytes`, or 256 where that is less.
    """

    memory_bytes: int = 1 << 30
    processes: int = 128
    disk_bytes: int = 1 << 29
    shm_bytes: int = 64 << 20
    file_bytes: int | None = None
    open_files: int = 1024

    def __post_init__(self) -> None:
        for name, least in (
            ("memory_bytes", 32 << 20),
            ("processes", 1),
            ("disk_bytes", 1 << 20),
            ("shm_bytes", 4096),
            ("open_files", 16),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"Limits.{name}={value!r} is too small: give at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a new sandbox is like.

    Attributes:
        hostname: Its host name (isolation `bubblewrap`).
        env: Added to the environment of every program; it starts with `PATH`, `HOME`, `USER`,
            `LOGNAME`, `SHELL` and `LANG` and nothing of the host's.
        network: Share the host's network. Off: a network of its own with nothing but loopback
            (isolation `bubblewrap`; `process` cannot switch it off).
        limits: What it may use.
    """

    hostname: str = "sandbox"
    env: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())
    network: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationInfo:
    """What isolation a launcher really gives.

    Attributes:
        mode: `bubblewrap` or `process`.
        sandbox_uid: The host's user id of the sandboxes' processes; where each has its own, the
            first of the range.
        cgroup: `v1`, `v2`, or empty when no cgroup is writable.
        syscall_filter: Programs run under a system call filter. False on a machine whose system
            calls are not known here, or whose kernel has no filters.
        unbounded: What no limit holds: `cpu`, and without a cgroup `kernel_memory` (the buffers of
            sockets and pipes: bounded only by how many a sandbox may open).
    """

    mode: IsolationMode
    sandbox_uid: int = 0
    cgroup: str = ""
    syscall_filter: bool = True
    unbounded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a program ended.

    Attributes:
        exit_code: Its exit code; -1 when a signal ended it.
        signal: The signal, or `None`.
        reason: The limit because of which it, or something else of its session, was killed; or
            `None`.
    """

    exit_code: int
    signal: int | None = None
    reason: EndReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """A finished program: how it ended and what it wrote."""

    end: ProcessEnd
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DirEntry:
    """One file, directory, link or other thing in a sandbox.

    Attributes:
        name: The last part of its path.
        path: Where it is, absolute.
        type: What it is; links are not followed.
        size: In bytes.
        mode: Its permission bits.
        permissions: The same as `ls -l` shows them, with the type in front: `-rw-r--r--`.
        owner: `user` or `root`.
        group: Likewise.
        modified_ns: Nanoseconds since 1970.
        target: Where a link points.
    """

    name: str
    path: str
    type: Literal["file", "dir", "symlink", "other"]
    size: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_ns: int
    target: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One change below a watched directory.

    Attributes:
        kind: What happened; `overflow` means that changes were lost.
        name: The path below the watched directory.
        path: The absolute path; empty of an `overflow`.
    """

    kind: Literal["create", "write", "remove", "rename", "chmod", "overflow"]
    name: str
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a sandbox uses now.

    Attributes:
        processes: Processes, without the supervisor.
        memory_bytes: Their anonymous and shared memory.
        cpu_s: Processor time since its start, in seconds.
        disk_used_bytes: Of its file system.
        disk_total_bytes: Size of its file system.
    """

    processes: int
    memory_bytes: int
    cpu_s: float
    disk_used_bytes: int
    disk_total_bytes: int
