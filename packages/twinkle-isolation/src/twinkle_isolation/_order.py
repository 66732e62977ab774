"""What the zygote is told of a sandbox it has to make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from twinkle_isolation import jail
from twinkle_isolation.types import Limits, SandboxSpec

__all__ = ["order_message"]

_STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BYTES_PER_FILE = 32 << 10  # of kernel memory, where nobody counts it
_LEAST_FILES = 256


def order_message(
    spec: SandboxSpec,
    *,
    uid: int,
    gid: int,
    directory: str | None,
    shares: Sequence[str],
    restored: bool,
    accounted: bool,
) -> dict[str, Any]:
    """Make the message for one sandbox.

    Args:
        spec: What it is like.
        uid: The host's user it runs as.
        gid: Its group.
        directory: Where its files are without a root of its own; `None` with one.
        shares: Directories whose `bin` comes first in `PATH`.
        restored: An archive of files is passed along.
        accounted: A control group counts what it uses.
    """
    limits = spec.limits
    # A full tmpfs says so; where there is none, only the longest file can be limited.
    longest = limits.file_bytes or (None if directory is None else limits.disk_bytes)
    return {
        "uid": uid,
        "gid": gid,
        "hostname": spec.hostname,
        "network": spec.network,
        "directory": directory,
        "env": _base_env(shares) | dict(spec.env),
        "archive": restored,
        "accounted": accounted,
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "disk_bytes": limits.disk_bytes,
        "shm_bytes": limits.shm_bytes,
        "file_bytes": longest,
        "open_files": _open_files(limits, accounted=accounted),
    }


def _base_env(shares: Sequence[str]) -> dict[str, str]:
    front = [f"{path}/bin" for path in shares if os.path.isdir(f"{path}/bin")]
    prefix = jail.python_prefix()
    back = [f"{prefix}/bin"] if prefix is not None else []
    return {
        "PATH": ":".join([*front, _STANDARD_PATH, *back, "/opt/bin"]),
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
    }


def _open_files(limits: Limits, *, accounted: bool) -> int:
    """Return how many files a process may open; see `Limits.open_files`."""
    if accounted:
        return limits.open_files
    share = limits.memory_bytes // limits.processes // _BYTES_PER_FILE
    return min(limits.open_files, max(_LEAST_FILES, share))
