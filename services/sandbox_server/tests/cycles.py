"""After 200 lives of sandboxes, 50 killed clients and a killed server, all is as before.

`nox -s cycles` runs it (`CYCLES` is another number of lives, `CLIENTS` of clients).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import KEY, NOBODY, Server, http, start_server

if TYPE_CHECKING:
    from collections.abc import Iterator

CYCLES = int(os.environ.get("CYCLES", "200"))
CLIENTS = int(os.environ.get("CLIENTS", "50"))
AT_ONCE = 5
SANDBOXES = 20  # when the server is killed
SETTLE_TIMEOUT_S = 90
KILLED_SERVER_TIMEOUT_S = 5
HEAD = f"""
import sys, e2b
options = {{"api_url": sys.argv[1], "sandbox_url": sys.argv[1], "api_key": {KEY!r}, "debug": False}}
"""
LIVES = """
for _ in range(int(sys.argv[2])):
    sandbox = e2b.Sandbox.create("base", timeout=120, **options)
    sandbox.files.write("a/b", "text")
    assert sandbox.commands.run("setsid sleep 100 >&- 2>&- & cat a/b").stdout == "text"
    assert sandbox.kill()
"""
BUSY = """
sandbox = e2b.Sandbox.create("base", timeout=int(sys.argv[2]), **options)
stubborn = "trap '' TERM; setsid sleep 1000 & head -c 1M /dev/zero > f; echo up; wait"
sandbox.commands.run(stubborn, on_stdout=lambda text: print(text, flush=True), timeout=0)
"""
State = dict[str, int]


@pytest.fixture(params=["root", "nobody"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root can start a server as root")
    uid = NOBODY if request.param == "nobody" and os.geteuid() == 0 else None
    server = start_server("bubblewrap", "--api-key", KEY, "--spares", "2", uid=uid)
    yield server
    if server.process.poll() is None:
        server.stop()
    assert server.process.stdout is not None
    server.process.stdout.close()


def client(server: Server, program: str, argument: int) -> subprocess.Popen[str]:
    """Start a client in a process of its own, whose connections end with it."""
    command = [sys.executable, "-c", HEAD + program, server.url, str(argument)]
    errors = subprocess.DEVNULL if program == BUSY else None  # it loses its server, or is killed
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def wait_busy(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(20)
    assert process.stdout is not None
    process.stdout.close()


def all_lived(clients: list[subprocess.Popen[str]]) -> None:
    for one in clients:
        assert one.wait(1200) == 0
        end(one)


def tree_of(pid: int) -> dict[int, str]:
    """Return a process and all that came from it, with the state of each."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            parents[int(name)], states[int(name)] = int(parent), state
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {each: states[each] for each in found if each in states}


def state_of(server: Server) -> State:
    pid = server.process.pid
    states = tree_of(pid)
    mounts = 0
    for each in states:
        with contextlib.suppress(OSError):
            mounts += len(Path(f"/proc/{each}/mountinfo").read_text().splitlines())
    return {
        "processes": len(states),
        "zombies": sum(state == "Z" for state in states.values()),
        "cgroups": sum(
            folder.startswith(f"twinkle-{pid}-")  # `walk` passes over what ends meanwhile
            for _, folders, _ in os.walk("/sys/fs/cgroup")
            for folder in folders
        ),
        "mounts": mounts,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "temporary files": sum(1 for _ in Path("/tmp").glob(f"twinkle-*-{pid}-*")),
    }


def settled(server: Server, wanted: State | None = None) -> State:
    """Return the state once no sandbox is left and nothing changes any more."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    seen: list[State] = []
    while True:
        listed = http.get(f"{server.url}/v2/sandboxes").json()
        seen = [*seen[-3:], state_of(server)]
        same = len(seen) == 4 and all(state == seen[0] for state in seen)
        if not listed and same and wanted in (None, seen[0]):
            return seen[0]
        assert time.monotonic() < deadline, (listed, seen, wanted)
        time.sleep(0.25)


def test_lives_and_killed_clients_leave_nothing(server: Server) -> None:
    all_lived([client(server, LIVES, 1)])  # what is made once is made
    before = settled(server)
    begun = time.monotonic()
    all_lived([client(server, LIVES, CYCLES // AT_ONCE) for _ in range(AT_ONCE)])
    print(f"\n{CYCLES} lives: {time.monotonic() - begun:.0f} s")
    lease_s = 30
    for _ in range(CLIENTS // AT_ONCE):
        clients = [client(server, BUSY, lease_s) for _ in range(AT_ONCE)]
        for one in clients:
            wait_busy(one)
        for one in clients:
            end(one)
    print(f"{CLIENTS} killed clients: {len(http.get(f'{server.url}/v2/sandboxes').json())} left")
    assert settled(server, before) == before
    print("before and after:", before)


def test_a_killed_server_leaves_no_process(server: Server) -> None:
    clients = [client(server, BUSY, 600) for _ in range(SANDBOXES)]
    for one in clients:
        wait_busy(one)
    pids = tree_of(server.process.pid)
    assert len(pids) > 3 * SANDBOXES
    begun = time.monotonic()
    server.stop(signal.SIGKILL)
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}") and _alive(pid)]:
        assert time.monotonic() - begun < KILLED_SERVER_TIMEOUT_S, left
        time.sleep(0.05)
    print(f"\n{len(pids)} processes ended {time.monotonic() - begun:.1f} s after their server")
    for one in clients:
        end(one)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
