"""Leases are as long as they were asked for, whatever happens to the clock of the machine."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from .conftest import http

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import e2b
    from conftest import Server

# A clock that is wrong by what a file says.
PRELUDE = """
import pathlib, time
true, shift = time.time, pathlib.Path({path!r})
time.time = lambda: true() + float(shift.read_text())
"""
HOUR_S = 3600


class Clock:
    """The clock of the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shift(0)

    def shift(self, seconds: float) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(str(seconds))
        part.replace(self.path)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "shift")


@pytest.fixture
def clocked(clock: Clock, start: Callable[..., Server]) -> Iterator[Server]:
    prelude = PRELUDE.format(path=str(clock.path))
    server = start("process", prelude=prelude)
    yield server
    server.kill_all()
    server.stop()


def is_there(server: Server, sandbox: e2b.Sandbox) -> bool:
    return http.get(f"{server.url}/sandboxes/{sandbox.sandbox_id}").status_code == 200


def wait_gone(server: Server, sandbox: e2b.Sandbox) -> None:
    deadline = time.monotonic() + 30
    while is_there(server, sandbox):
        assert time.monotonic() < deadline, "its lease does not end"
        time.sleep(0.05)


def test_the_end_of_a_lease_is_told_the_same_each_time(clocked: Server) -> None:
    sandbox = clocked.sandbox(timeout=300)
    assert len({sandbox.get_info().end_at for _ in range(100)}) == 1


def test_a_clock_that_is_set_forward_ends_no_lease(clocked: Server, clock: Clock) -> None:
    long, short = clocked.sandbox(timeout=300), clocked.sandbox(timeout=2)
    clock.shift(HOUR_S)
    wait_gone(clocked, short)
    assert is_there(clocked, long)
    info = long.get_info()
    assert info.end_at.timestamp() - time.time() > HOUR_S + 60  # told in the server's time


def test_a_clock_that_is_set_back_lengthens_no_lease(clocked: Server, clock: Clock) -> None:
    sandbox = clocked.sandbox(timeout=2)
    renewed = clocked.sandbox(timeout=300)
    clock.shift(-HOUR_S)
    renewed.set_timeout(2)
    wait_gone(clocked, sandbox)
    wait_gone(clocked, renewed)
