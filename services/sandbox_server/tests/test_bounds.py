"""What a peer, or a program in a sandbox, can make the server hold, and what it may not reach."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import base64
import gzip
import os
import socket
import struct
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request

from sandbox_server.envd.connect import Call
from sandbox_server.envd.filesystem import STREAMS
from sandbox_server.templates import BuildState

from .conftest import NOBODY, http

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    import e2b
    from conftest import Server

    from sandbox_server.record import SandboxRecord


@pytest.fixture(scope="module", params=["root", "nobody"])
def served(start: Callable[..., Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("only root can start a server as root")
    nobody = request.param == "nobody" and os.geteuid() == 0
    server = start("bubblewrap", uid=NOBODY if nobody else None)
    yield server
    server.kill_all()


@pytest.fixture(scope="module")
def box(served: Server) -> e2b.Sandbox:
    return served.sandbox()


def headers_of(box: e2b.Sandbox, **more: str) -> dict[str, str]:
    token = box.connection_config.sandbox_headers["X-Access-Token"]
    return {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": token, **more}


def post_without_end(server: Server, path: str, headers: dict[str, str], body: bytes) -> Any:
    """Send the begin of a chunked request and leave it open."""
    address = urlsplit(server.url)
    assert address.hostname and address.port
    peer = socket.create_connection((address.hostname, address.port), timeout=20)
    lines = [f"POST {path} HTTP/1.1", f"Host: {address.netloc}", "Transfer-Encoding: chunked"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "", ""]).encode()
    peer.sendall(head + f"{len(body):x}\r\n".encode() + body + b"\r\n")
    return peer


@pytest.mark.parametrize("method", ["process.Process/Start", "filesystem.Filesystem/WatchDir"])
def test_a_second_message_is_refused_at_once(served: Server, box: e2b.Sandbox, method: str) -> None:
    headers = headers_of(box, **{"Content-Type": "application/connect+json"})
    body = (struct.pack("!BI", 0, 2) + b"{}") * 3
    with post_without_end(served, f"/{method}", headers, body) as peer:
        answer = b""
        while b"found more" not in answer:
            piece = peer.recv(65536)
            assert piece, answer
            answer += piece


def test_a_form_is_written_while_it_arrives(served: Server, box: e2b.Sandbox) -> None:
    headers = headers_of(box, **{"Content-Type": "multipart/form-data; boundary=b"})
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="early"\r\n\r\n'
    with post_without_end(served, "/files", headers, body + b"x" * 500_000):
        deadline = time.monotonic() + 20
        while not (box.files.exists("early") and box.files.get_info("early").size > 100_000):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_several_files_are_not_written_to_one_path(served: Server, box: e2b.Sandbox) -> None:
    files = [("file", ("a", b"one")), ("file", ("b", b"two"))]
    answer = http.post(f"{served.url}/files?path=c", files=files, headers=headers_of(box))
    assert (answer.status_code, "several files" in answer.json()["message"]) == (400, True)
    answer = http.post(f"{served.url}/files", files=files, headers=headers_of(box))
    assert [entry["name"] for entry in answer.json()] == ["a", "b"]
    assert (box.files.read("a"), box.files.read("b")) == ("one", "two")


def test_many_gzip_members_are_refused(served: Server, box: e2b.Sandbox) -> None:
    more = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    url = f"{served.url}/files?path=members"
    answer = http.post(url, content=gzip.compress(b"") * 2000, headers=headers_of(box, **more))
    assert (answer.status_code, "gzip members" in answer.json()["message"]) == (400, True)


@pytest.mark.parametrize(
    ("seconds", "year"),
    [(253_402_300_800, 9999), (10**15, 9999), (-62_135_596_801, 1), (-50_000_000_000, 385)],
)
def test_a_file_of_any_time_is_listed(box: e2b.Sandbox, seconds: int, year: int) -> None:
    box.files.make_dir("times")
    box.files.write("times/file", "")
    program = f"import os; os.utime('times/file', ns=({seconds} * 10**9,) * 2)"
    if abs(seconds) > 9 * 10**9:  # more than the nanoseconds of 64 bits
        program = f"import os; os.utime('times/file', ({seconds}, {seconds}))"
    box.commands.run(f'python3 -c "{program}"')
    (entry,) = box.files.list("times")
    assert entry.modified_time is not None
    assert entry.modified_time.year == year
    assert box.files.get_info("times/file").modified_time == entry.modified_time
    assert box.files.exists("times/file")


def test_the_log_of_a_build_is_bounded() -> None:
    build = BuildState(template_id="t", build_id="b")
    for _ in range(5000):
        build.log("x" * 65_000)
    build.log("it failed", level="error")
    assert sum(len(entry["message"]) for entry in build.logs) < 600_000
    assert max(len(entry["message"]) for entry in build.logs) < 2100
    assert build.logs[-1]["message"] == "it failed"


def test_the_root_directory_cannot_be_moved(served: Server, box: e2b.Sandbox) -> None:
    url = f"{served.url}/filesystem.Filesystem/Move"
    answer = http.post(url, json={"source": "/", "destination": "x"}, headers=headers_of(box))
    assert answer.status_code == 400, answer.text


def test_a_paused_sandbox_is_resumed_only_for_its_token(served: Server) -> None:
    box = served.sandbox(lifecycle={"on_timeout": "pause", "auto_resume": True})
    box.pause()

    def state() -> str:
        return http.get(f"{served.url}/sandboxes/{box.sandbox_id}").json()["state"]

    for headers in ({}, {"X-Access-Token": "wrong"}):
        for path in ("/health", "/nonsense", "/files?path=a", "/files?path=a&signature=v1_wrong"):
            sent = {"E2b-Sandbox-Id": box.sandbox_id, **headers}
            assert http.get(f"{served.url}{path}", headers=sent).status_code == 401, path
    assert state() == "paused"
    assert http.get(f"{served.url}/health", headers=headers_of(box)).status_code == 204
    assert state() == "running"


def test_a_name_of_another_domain_is_not_of_a_sandbox(served: Server, box: e2b.Sandbox) -> None:
    url = f"{served.url}/health"
    for domain in ("evil.example", "localhost.evil.example", "localhost@evil.example"):
        host = f"49983-{box.sandbox_id}.{domain}"
        answer = http.get(f"{served.url}/v2/sandboxes", headers={"Host": host})
        assert answer.status_code == 403, host
    assert http.get(url, headers={"Host": f"49983-{box.sandbox_id}.localhost"}).status_code == 204


@pytest.mark.parametrize("name", ["E2b-Sandbox-Id", "X-Access-Token", "Authorization"])
def test_a_header_that_decides_is_there_once(served: Server, box: e2b.Sandbox, name: str) -> None:
    headers = headers_of(box) | {"Authorization": "Basic dXNlcjo="}
    twice = [*headers.items(), (name, headers[name])]
    answer = http.post(f"{served.url}/process.Process/List", json={}, headers=twice)
    assert (answer.status_code, "more than once" in answer.json()["message"]) == (400, True)


def test_a_second_host_is_refused(served: Server) -> None:
    with post_without_end(served, "/v2/sandboxes", {"host": "evil.example"}, b"{}") as peer:
        assert peer.recv(12) == b"HTTP/1.1 400"


def test_a_signature_is_for_the_user_it_names(served: Server, box: e2b.Sandbox) -> None:
    box.files.write("/home/user/mine", "of the user")
    box.files.write("/root/mine", "of root", user="root")
    headers = {"E2b-Sandbox-Id": box.sandbox_id}
    headers["Authorization"] = "Basic " + base64.b64encode(b"root:").decode()
    url = box.download_url("mine")
    assert http.get(url, headers=headers).text == "of the user"


def test_a_server_without_descriptors_asks_to_come_again(start: Callable[..., Server]) -> None:
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))"
    server = start("bubblewrap", "--spares", "0", prelude=prelude)
    message = {"templateID": "base", "timeout": 60}
    answer = http.post(f"{server.url}/v2/sandboxes", json=message)
    for _ in range(120):
        if answer.status_code != 201:
            break
        answer = http.post(f"{server.url}/v2/sandboxes", json=message)
    assert (answer.status_code, answer.headers.get("retry-after")) == (429, "1"), answer.text
    assert http.get(f"{server.url}/health").status_code == 200
    server.stop()


def test_the_sum_of_what_sandboxes_may_use_is_limited(start: Callable[..., Server]) -> None:
    options = ("--memory-mb", "128", "--disk-mb", "64", "--total-memory-mb", "400")
    server = start("bubblewrap", *options)
    first, _ = server.sandbox(), server.sandbox()
    message = {"templateID": "base", "timeout": 60}
    answer = http.post(f"{server.url}/v2/sandboxes", json=message)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "400 MB" in answer.json()["message"]
    first.kill()
    assert http.post(f"{server.url}/v2/sandboxes", json=message).status_code == 201
    server.stop()


async def test_a_watch_leaves_no_task() -> None:
    closed = asyncio.Event()

    class Watch:
        async def events(self) -> AsyncIterator[object]:
            await closed.wait()
            for _ in ():
                yield

        async def close(self) -> None:
            closed.set()

    async def watch(*_: object, **__: object) -> Watch:
        return Watch()

    record = cast(
        "SandboxRecord",
        SimpleNamespace(
            sandbox=SimpleNamespace(watch=watch), default_user="user", default_cwd=None
        ),
    )
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [],
        "query_string": b"",
    }
    scope["headers"] = [(b"keepalive-ping-interval", b"1")]
    call = Call(record, Request(scope), "user")
    model, watch_dir = STREAMS["/filesystem.Filesystem/WatchDir"]
    messages = cast("AsyncGenerator[Any, None]", watch_dir(call, model.model_validate({})))
    assert await anext(messages) == {"start": {}}
    assert await anext(messages) == {"keepalive": {}}
    await messages.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}
