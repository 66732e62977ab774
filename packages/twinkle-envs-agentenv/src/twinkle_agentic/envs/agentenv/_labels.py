"""Labels on every sandbox, by which the leftovers of a dead trainer can be told from live ones."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

PREFIX = "twinkle-"
"""Of every label set here; metadata of the user does not start with it."""
CREATED_BY = "twinkle-created-by"
MAKER = "twinkle-envs-agentenv"
"""The value of `CREATED_BY`."""
RUN = "twinkle-run"
CREATE_ID = "twinkle-create"
"""One id per creation, whatever the number of requests it took."""
EPISODE = "twinkle-episode"
_HOST = "twinkle-host"
_PID = "twinkle-pid"
_SPACE = "twinkle-pid-space"  # containers may share a host name, and number processes on their own
_START = "twinkle-process-start"  # clock ticks since boot: process ids are used again


def default_run() -> str:
    """Return the run label where none is given: `TWINKLE_RUN`, else one made up per process."""
    return os.environ.get("TWINKLE_RUN") or _made_up_run(os.getpid())


def process_labels(run: str) -> dict[str, str]:
    """Return the labels of a sandbox that this process creates."""
    return {CREATED_BY: MAKER, RUN: run, **_process(os.getpid())}


def owner_lives(labels: Mapping[str, str]) -> bool | None:
    """Tell whether the process that made a sandbox runs; `None` where it cannot be known here."""
    pid = labels.get(_PID, "")
    here = _process(os.getpid())
    if any(labels.get(name) != here[name] for name in (_HOST, _SPACE)) or not pid.isdigit():
        return None
    if not here[_SPACE]:
        return None
    start = _process_start(int(pid))
    return start is not None and start == labels.get(_START)


@functools.cache
def _made_up_run(pid: int) -> str:
    return f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}"


@functools.cache
def _process(pid: int) -> dict[str, str]:
    """Return the labels of this process; by id, for a fork inherits what is cached."""
    return {
        _HOST: socket.gethostname(),
        _SPACE: _pid_space(),
        _PID: str(pid),
        _START: _process_start(pid) or "",
    }


def _pid_space() -> str:
    """Name where process ids mean the same, by this boot and the namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything; field 22 is the 20th after it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
