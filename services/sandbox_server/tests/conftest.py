from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import e2b
import httpx
import pytest

import sandbox_server
import twinkle_isolation

NOBODY = 65534
KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
http = httpx.Client(headers={"X-API-Key": KEY}, timeout=30)  # a server without a key ignores it


@dataclass
class Server:
    """A server in its own process."""

    process: subprocess.Popen[str]
    url: str
    mode: str
    made: list[e2b.Sandbox] = field(default_factory=list[e2b.Sandbox])

    @property
    def opts(self) -> dict[str, Any]:
        return {"api_url": self.url, "sandbox_url": self.url, "api_key": KEY, "debug": False}

    def sandbox(self, template: str = "base", **arguments: Any) -> e2b.Sandbox:
        arguments.setdefault("timeout", 120)
        sandbox = e2b.Sandbox.create(template, **arguments, **self.opts)
        self.made.append(sandbox)
        return sandbox

    def kill_all(self) -> None:
        while self.made:
            with contextlib.suppress(Exception):
                self.made.pop().kill()

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(20)


def interpreter_for(uid: int | None) -> tuple[list[str], dict[str, str]]:
    """Return a Python that user `uid` may run, and the environment to find the server."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"}
    roots = [Path(sandbox_server.__file__).parents[1], Path(twinkle_isolation.__file__).parents[1]]
    site = Path(e2b.__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in [*roots, site])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"]
    for candidate in candidates:
        try:
            subprocess.run(
                [candidate, "-c", "import sandbox_server.app"],
                env=environment,
                cwd="/",
                check=True,
                capture_output=True,
                timeout=60,
                **identity(uid),
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return [candidate, "-c", "from sandbox_server.cli import main; main()"], environment
    pytest.skip(f"no interpreter of {version} that user {uid} may run: tried {candidates}")


def identity(uid: int | None) -> dict[str, Any]:
    """Return the arguments of `Popen` that start a program as another user."""
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def start_server(mode: str, *options: str, uid: int | None = None, prelude: str = "") -> Server:
    """Start a server; `prelude` is Python that its process runs first."""
    command, environment = interpreter_for(uid)
    command[-1] = f"{prelude}\n{command[-1]}"
    if (mode == "process" or "--network" in options) and "--api-key" not in options:
        options = (*options, "--api-key", KEY)
    process = subprocess.Popen(
        [*command, "--port", "0", "--isolation", mode, "--log-level", "warning", *options],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        text=True,
        **identity(uid),
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on "), line
    server = Server(process, line.split()[2], mode)
    wait_healthy(server)
    return server


def wait_healthy(server: Server) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "the server ended at its start"
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{server.url}/health", timeout=5),
        ):
            return
        time.sleep(0.05)
    raise AssertionError("the server is not healthy after 30 s")


def kinds() -> list[str]:
    return ["bubblewrap-root", "bubblewrap-nobody", "process-root", "process-nobody"]


@pytest.fixture(scope="session", params=kinds())
def any_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Every way to run a server: with isolation and without, as root and as an ordinary user."""
    mode, user = request.param.split("-")
    if os.geteuid() == 0:
        uid = None if user == "root" else NOBODY
    elif user == "root":
        pytest.skip("only root can start a server as root")
    else:
        uid = None
    server = start_server(
        mode, "--memory-mb", "256", "--disk-mb", "64", "--processes", "64", uid=uid
    )
    yield server
    server.kill_all()
    server.stop()
    assert server.process.stdout is not None
    server.process.stdout.close()


@pytest.fixture
def server(any_server: Server) -> Iterator[Server]:
    yield any_server
    any_server.kill_all()


@pytest.fixture
def sandbox(server: Server) -> e2b.Sandbox:
    return server.sandbox()


@pytest.fixture(scope="session", params=["root", "nobody"])
def isolated_session(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with isolation and small limits, for what only isolation promises."""
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root can start a server as root")
    uid = NOBODY if request.param == "nobody" and os.geteuid() == 0 else None
    options = ("--memory-mb", "96", "--disk-mb", "16", "--processes", "32", "--max-output-mb", "8")
    server = start_server("bubblewrap", *options, uid=uid)
    yield server
    server.kill_all()
    server.stop()
    assert server.process.stdout is not None
    server.process.stdout.close()


@pytest.fixture
def isolated(isolated_session: Server) -> Iterator[Server]:
    yield isolated_session
    isolated_session.kill_all()


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Server]]:
    """Start servers of a test's own; they end with the session at the latest."""
    started: list[Server] = []

    def run(
        mode: str = "bubblewrap", *options: str, uid: int | None = None, prelude: str = ""
    ) -> Server:
        server = start_server(mode, *options, uid=uid, prelude=prelude)
        started.append(server)
        return server

    yield run
    for server in started:
        if server.process.poll() is None:
            server.stop()
        if server.process.stdout is not None:
            server.process.stdout.close()
