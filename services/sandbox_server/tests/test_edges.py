"""Requests without sense, clients that leave, and supervisors that do not answer."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from sandbox_server.errors import as_api_error

from .conftest import http

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import e2b
    from conftest import Server


@pytest.fixture(scope="module")
def impatient(start: Callable[..., Server]) -> Iterator[Server]:
    """A server that gives up soon on supervisors, which are its own user's processes."""
    server = start("process", "--answer-timeout-s", "2")
    yield server
    server.kill_all()


@pytest.fixture(scope="module")
def roomy(start: Callable[..., Server]) -> Iterator[Server]:
    """A server whose sandboxes may have files of any length, as long as they are empty."""
    server = start("bubblewrap")
    yield server
    server.kill_all()


def call(
    server: Server, sandbox: e2b.Sandbox, method: str, message: dict[str, Any]
) -> httpx.Response:
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "X-Access-Token": sandbox.connection_config.sandbox_headers["X-Access-Token"],
    }
    return http.post(f"{server.url}/{method}", json=message, headers=headers, timeout=60)


def supervisor_of(sandbox: e2b.Sandbox) -> int:
    return int(sandbox.commands.run("ps -o ppid= -p $$").stdout)


def wait_until(check: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state_of(server: Server, sandbox: e2b.Sandbox) -> int:
    return http.get(f"{server.url}/sandboxes/{sandbox.sandbox_id}", timeout=30).status_code


def test_a_signal_wants_a_process(impatient: Server) -> None:
    sandbox = impatient.sandbox()
    handle = sandbox.commands.run("sleep 100", background=True)
    selectors: list[dict[str, Any]] = [{}, {"process": {}}, {"process": {"tag": None}}]
    for selector in selectors:
        answer = call(
            impatient,
            sandbox,
            "process.Process/SendSignal",
            {**selector, "signal": "SIGNAL_SIGKILL"},
        )
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")
    assert [p.pid for p in sandbox.commands.list()] == [handle.pid]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("filesystem.Filesystem/ListDir", {"path": ".", "depth": "x"}),
        ("filesystem.Filesystem/ListDir", {"path": ".", "depth": [1]}),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": []}),
        ("filesystem.Filesystem/RemoveWatcher", {"watcherId": {}}),
        ("filesystem.Filesystem/Move", {"source": 1, "destination": "x"}),
        ("process.Process/SendSignal", {"process": {"pid": "x"}, "signal": "SIGNAL_SIGTERM"}),
        ("process.Process/SendSignal", {"process": {"pid": None}, "signal": "SIGNAL_SIGTERM"}),
        ("process.Process/SendSignal", {"process": {"tag": {}}, "signal": "SIGNAL_SIGTERM"}),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": []}),
        ("process.Process/SendInput", {"process": {"pid": 1}, "input": 5}),
        ("process.Process/Update", {"process": 7}),
    ],
)
def test_a_value_of_the_wrong_kind_is_the_clients_mistake(
    impatient: Server, method: str, message: dict[str, Any]
) -> None:
    if not impatient.made:
        impatient.sandbox()
    answer = call(impatient, impatient.made[0], method, message)
    assert answer.status_code in (400, 404), answer.text


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("x"), ValueError("x")])
def test_the_servers_own_mistakes_are_not_the_clients(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    answer = as_api_error(error)
    assert (answer.status, answer.code) == (500, "internal")
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize("path", ["v2/sandboxes", "snapshots"])
@pytest.mark.parametrize("token", ["%25%25%25", "YWJj", "%C3%A9", "fHx8", "bmFufHg="])
def test_a_token_that_is_none_is_refused(impatient: Server, path: str, token: str) -> None:
    answer = http.get(f"{impatient.url}/{path}?nextToken={token}", timeout=30)
    assert answer.status_code == 400, answer.text
    assert "nextToken" in answer.json()["message"]


def test_pages_of_snapshots(impatient: Server) -> None:
    sandbox = impatient.sandbox()
    made = [sandbox.create_snapshot().snapshot_id for _ in range(3)]
    seen: list[str] = []
    token = ""
    while True:
        answer = http.get(f"{impatient.url}/snapshots?limit=1&nextToken={token}", timeout=30)
        seen += [entry["snapshotID"] for entry in answer.json()]
        token = answer.headers.get("x-next-token", "")
        if not token:
            break
    assert [name.partition(":")[0] for name in seen] == [name.partition(":")[0] for name in made]


def test_a_download_ends_when_its_client_leaves(roomy: Server) -> None:
    sandbox = roomy.sandbox()
    sandbox.commands.run("truncate -s 15G big")
    host, _, port = roomy.url.removeprefix("http://").partition(":")
    token = sandbox.connection_config.sandbox_headers["X-Access-Token"]
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"GET /files?path=big HTTP/1.1\r\nHost: {host}\r\nE2b-Sandbox-Id: {sandbox.sandbox_id}"
            f"\r\nX-Access-Token: {token}\r\n\r\n".encode()
        )
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    last = -1

    def idle() -> bool:
        nonlocal last
        with open(f"/proc/{roomy.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        before, last = last, int(fields[11]) + int(fields[12])
        time.sleep(0.3)
        return last - before <= 3

    wait_until(idle, 5)


def test_a_file_without_end_is_not_downloaded(roomy: Server) -> None:
    sandbox = roomy.sandbox()
    sandbox.commands.run("truncate -s 20G big")
    token = sandbox.connection_config.sandbox_headers["X-Access-Token"]
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": token}
    answer = http.get(f"{roomy.url}/files?path=big", headers=headers, timeout=30)
    assert answer.status_code == 413
    assert "longer" in answer.json()["message"]


@pytest.mark.parametrize("on_timeout", ["kill", "pause"])
def test_a_lease_ends_although_the_supervisor_is_silent(impatient: Server, on_timeout: str) -> None:
    body = {"templateID": "base", "timeout": 2, "autoPause": on_timeout == "pause"}
    made = http.post(f"{impatient.url}/sandboxes", json=body, timeout=30).json()["sandboxID"]
    sandbox = impatient.sandbox()
    url = f"{impatient.url}/sandboxes/{made}"
    body = {"process": {"cmd": "/bin/bash", "args": ["-c", "kill -STOP $PPID; sleep 100"]}}
    text = str(body).replace("'", '"').encode()
    envelope = b"\0" + len(text).to_bytes(4, "big") + text
    host, _, port = impatient.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            f"POST /process.Process/Start HTTP/1.1\r\nHost: {host}\r\nE2b-Sandbox-Id: {made}\r\n"
            "Content-Type: application/connect+json\r\n"
            f"Content-Length: {len(envelope)}\r\n\r\n".encode()
            + envelope
        )
        wait_until(lambda: http.get(url, timeout=30).status_code == 404, 15)
    assert sandbox.commands.run("echo fine").stdout == "fine\n"


def test_a_sandbox_that_is_lost_on_resume_is_no_missing_file(impatient: Server) -> None:
    sandbox = impatient.sandbox(lifecycle={"on_timeout": "pause", "auto_resume": True})
    pid = supervisor_of(sandbox)
    sandbox.pause()
    os.kill(pid, signal.SIGSTOP)
    token = sandbox.connection_config.sandbox_headers["X-Access-Token"]
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": token}
    answer = http.get(f"{impatient.url}/files?path=x", headers=headers, timeout=30)
    assert answer.status_code == 502
    assert state_of(impatient, sandbox) == 404


def test_a_closed_file_does_not_spoil_a_snapshot(impatient: Server) -> None:
    sandbox = impatient.sandbox()
    sandbox.commands.run("echo x > f; chmod 000 f; mkdir d; chmod 555 d")
    copy = impatient.sandbox(sandbox.create_snapshot().snapshot_id)
    assert copy.commands.run("chmod 400 f; cat f; stat -c %a d").stdout == "x\n555\n"
