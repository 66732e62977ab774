"""A real server in its own process, one for the whole test session."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_START_LIMIT_S = 90.0


@dataclass
class Server:
    """A running server and what it has printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list[str])
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/ws"


@contextlib.contextmanager
def _serve(
    command: list[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Generator[Server]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )
    server = Server(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        started = 0
        for line in process.stdout:
            server.lines.append(line)
            found = re.search(r"running on http://127\.0\.0\.1:(\d+)", line)
            if found:
                server.port = int(found.group(1))
            started += "Application startup complete" in line
            if server.port and started:
                ready.set()
        ready.set()  # it has ended

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(_START_LIMIT_S), "".join(server.lines)
        assert process.poll() is None, "".join(server.lines)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


Serve = Callable[..., contextlib.AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def serve() -> Serve:
    """Give the context manager that runs a server command."""
    return _serve


@pytest.fixture(scope="session")
def command() -> list[str]:
    """Give the console script on a free port."""
    return [str(Path(sys.executable).with_name("twinkle-openenv-server")), "--port", "0"]


@pytest.fixture(scope="session")
def server(serve: Serve, command: list[str]) -> Iterator[Server]:
    """Run one server with small limits."""
    options = ["--max-concurrent-envs", "4", "--step-timeout-s", "1"]
    options += ["--max-output-chars", "20000", "--max-code-chars", "2000000"]
    options += ["--max-queue", "0"]
    with serve([*command, *options]) as running:
        yield running
