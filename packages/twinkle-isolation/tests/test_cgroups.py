"""The control groups of a sandbox, where this process may make them."""

from __future__ import annotations

import os
import subprocess

import pytest

from twinkle_isolation import Limits
from twinkle_isolation.cgroups import Cgroups


def test_a_sandbox_shares_the_processor_as_one_whatever_it_starts() -> None:
    groups = Cgroups()
    if not groups.version:
        pytest.skip("no cgroup is writable here")
    lease = groups.make(Limits(memory_bytes=64 << 20, processes=7))
    assert lease is not None
    with subprocess.Popen(["sleep", "60"]) as program:
        try:
            for fd in lease.fds:
                os.write(fd, str(program.pid).encode())
            for directory in lease.directories:
                assert str(program.pid) in (directory / "cgroup.procs").read_text().split()
            files = {
                path.name: path.read_text().strip()
                for directory in lease.directories
                for path in directory.iterdir()
                if path.name in ("cpu.shares", "cpu.weight", "pids.max")
            }
        finally:
            program.kill()
    assert files.pop("pids.max") == "9"
    assert files in ({"cpu.shares": "1024"}, {"cpu.weight": "100"})
    lease.remove()
    assert not [directory for directory in lease.directories if directory.exists()]
