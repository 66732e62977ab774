"""What a peer can do before any key: connections, headers, half requests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import KEY, Server

_QUICK = (
    "from sandbox_server.limited_http import limits\n"
    "limits.head_timeout_s, limits.body_timeout_s = 1.0, 1.0\n"
)


def _connect(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    assert address.hostname and address.port
    return socket.create_connection((address.hostname, address.port), timeout=20)


def _closed(peer: socket.socket) -> bool:
    """Wait until the server closes the connection; it must answer nothing before."""
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


def _own_address(client: httpx.Client) -> object:
    answer = client.get("/health")
    assert answer.status_code == 200
    return answer.extensions["network_stream"].get_extra_info("client_addr")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-",
        b"POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_request_that_stops_is_closed(start: Callable[..., Server], sent: bytes) -> None:
    server = start(prelude=_QUICK)
    with _connect(server) as peer:
        peer.sendall(sent)
        assert _closed(peer)
    server.stop()


def test_a_head_that_trickles_is_closed_and_a_kept_connection_is_not(
    start: Callable[..., Server],
) -> None:
    server = start(prelude=_QUICK)
    with httpx.Client(base_url=server.url) as kept, _connect(server) as slow:
        first = _own_address(kept)
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        deadline = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                slow.sendall(b"X-More: 1\r\n")
                time.sleep(0.1)  # a peer that makes a little progress for ever
        assert time.monotonic() < deadline
        assert _own_address(kept) == first
    server.stop()


def test_a_long_head_is_refused_and_not_kept(start: Callable[..., Server]) -> None:
    server = start()
    before = _resident_kb(server.process.pid)
    for head in (b"GET /" + b"a" * (8 << 20), b"GET / HTTP/1.1\r\nX: " + b"a" * (8 << 20)):
        with _connect(server) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(head)
            assert peer.recv(64).startswith(b"HTTP/1.1 400")
    assert _resident_kb(server.process.pid) - before < 8 << 10
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.stop()


def test_more_connections_than_there_is_room_for_do_not_stop_the_server(
    start: Callable[..., Server],
) -> None:
    server = start(
        prelude="import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))\n" + _QUICK
    )
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(OSError):
                stack.enter_context(_connect(server))
        deadline = time.monotonic() + 30
        while True:  # the half-open ones end after a second
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                    break
            assert time.monotonic() < deadline
    server.stop()


def test_one_address_has_a_share_of_the_connections_and_of_the_log(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    server = start(
        prelude="import os\n"
        f"os.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)\n"
        "from sandbox_server import limited_http\n"
        "limited_http.is_loopback = lambda host: False\n"  # so that this peer is counted
        "limited_http.limits.connections_per_peer = 4\n"
    )
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(_connect(server)) for _ in range(4)]
        for _ in range(100):
            with _connect(server) as refused:
                assert _closed(refused)
        lines = log.read_text().splitlines()
        assert 1 <= len(lines) <= 2 + (time.monotonic() - begun)
        assert all("too many" in line for line in lines)
        peers[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peers[0].recv(12) == b"HTTP/1.1 200"
    server.stop()


def _resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise AssertionError(f"no VmRSS of {pid}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--network"], "give --api-key"),
        (["--isolation", "process"], "give --api-key"),
        (["--isolation", "process", "--api-key", KEY, "--host", "0.0.0.0"], "no boundary"),
    ],
)
def test_what_would_let_guests_in_is_refused_at_the_start(options: list[str], why: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sandbox_server", "--port", "0", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert why in done.stderr


def test_health_and_create_say_the_isolation(server: Server) -> None:
    answer = httpx.get(f"{server.url}/health").json()
    assert answer["isolation"] == server.mode
    made = httpx.post(
        f"{server.url}/v2/sandboxes",
        json={"templateID": "base"},
        headers={"X-API-Key": KEY},
        timeout=30,
    )
    assert made.json()["isolation"] == server.mode
