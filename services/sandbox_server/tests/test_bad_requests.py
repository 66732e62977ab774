"""Requests that can never be done are the client's mistake, and are said to be one."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import gzip
import json
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from starlette.requests import ClientDisconnect, Request

from sandbox_server.envd.files import upload
from sandbox_server.errors import ApiError
from sandbox_server.http import Body

from .conftest import http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import e2b
    from conftest import Server

    from sandbox_server.record import SandboxRecord

HALF = "\ud800"  # half of a character: JSON can write it, UTF-8 cannot
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def plain(start: Callable[..., Server]) -> Iterator[Server]:
    server = start("process")
    yield server
    server.kill_all()


@pytest.fixture(scope="module")
def box(plain: Server) -> e2b.Sandbox:
    return plain.sandbox()


def headers_of(box: e2b.Sandbox, **more: str) -> dict[str, str]:
    token = box.connection_config.sandbox_headers["X-Access-Token"]
    return {"E2b-Sandbox-Id": box.sandbox_id, "X-Access-Token": token, **more}


def start_program(server: Server, box: e2b.Sandbox, body: bytes) -> dict[str, Any]:
    """Send one enveloped message to `Start`; return the message that ends the answer."""
    content = struct.pack("!BI", 0, len(body)) + body
    headers = headers_of(box, **{"Content-Type": "application/connect+json"})
    url = f"{server.url}/process.Process/Start"
    answer = http.post(url, content=content, headers=headers, timeout=60)
    rest = answer.content
    while True:
        flags, length = struct.unpack_from("!BI", rest)
        if flags & 2:
            return json.loads(rest[5 : 5 + length])
        rest = rest[5 + length :]


def test_nested_too_deep(plain: Server, box: e2b.Sandbox) -> None:
    answer = http.post(f"{plain.url}/v2/sandboxes", content=b'{"templateID":' + DEEP)
    assert (answer.status_code, "JSON" in answer.json()["message"]) == (400, True)
    stat = f"{plain.url}/filesystem.Filesystem/Stat"
    assert http.post(stat, content=DEEP, headers=headers_of(box)).status_code == 400
    assert start_program(plain, box, DEEP)["error"]["code"] == "invalid_argument"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"x"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
    ],
)
def test_a_form_that_is_none(plain: Server, box: e2b.Sandbox, kind: str, body: bytes) -> None:
    url = f"{plain.url}/files?path=form.txt"
    answer = http.post(url, content=body, headers=headers_of(box, **{"Content-Type": kind}))
    assert (answer.status_code, "form" in answer.json()["message"]) == (400, True)
    assert not box.files.exists("form.txt")


@pytest.mark.parametrize("envs", [{"": "x"}, {"A=B": "x"}, {"A": "x\0y"}, {"A": HALF}])
def test_an_environment_that_no_program_can_have(plain: Server, envs: dict[str, str]) -> None:
    message = json.dumps({"templateID": "base", "envVars": envs})
    answer = http.post(f"{plain.url}/v2/sandboxes", content=message)
    assert answer.status_code == 400, answer.text
    assert "envVars" in answer.json()["message"]


@pytest.mark.parametrize(
    ("kind", "args"),
    [("ENV", ["A=B", "x"]), ("ENV", ["", "x"]), ("ENV", ["A", "x\0y"]), ("ARG", ["=x"])],
)
def test_a_step_that_would_spoil_every_sandbox(plain: Server, kind: str, args: list[str]) -> None:
    made = http.post(f"{plain.url}/v3/templates", json={"name": "spoiled"}).json()
    url = f"{plain.url}/v2/templates/{made['templateID']}/builds/{made['buildID']}"
    answer = http.post(url, json={"steps": [{"type": kind, "args": args}]})
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    "wrong",
    [{"args": [HALF]}, {"cmd": HALF}, {"cwd": HALF}, {"envs": {"A": HALF}}, {"envs": {HALF: "x"}}],
)
def test_half_a_character(plain: Server, box: e2b.Sandbox, wrong: dict[str, Any]) -> None:
    message: dict[str, Any] = {"process": {"cmd": "true", "args": [], **wrong}}
    end = start_program(plain, box, json.dumps(message).encode())
    assert end["error"]["code"] == "invalid_argument", end


def test_every_member_of_a_gzip_body_is_written(plain: Server, box: e2b.Sandbox) -> None:
    body = gzip.compress(b"one ") + gzip.compress(b"") + gzip.compress(b"two")
    more = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    url = f"{plain.url}/files?path=members.txt"
    answer = http.post(url, content=body, headers=headers_of(box, **more))
    assert answer.status_code == 200, answer.text
    assert box.files.read("members.txt") == "one two"
    garbage = http.post(url, content=body + b"more", headers=headers_of(box, **more))
    assert garbage.status_code == 400


def test_a_list_that_is_too_long(plain: Server, box: e2b.Sandbox) -> None:
    box.commands.run("mkdir most; cd most; seq 50000 | xargs touch", timeout=60)
    url = f"{plain.url}/filesystem.Filesystem/ListDir"
    message = {"path": "most"}
    whole = http.post(url, json=message, headers=headers_of(box), timeout=60)
    assert len(whole.json()["entries"]) == 50_000
    box.commands.run("touch most/one-more")
    refused = http.post(url, json=message, headers=headers_of(box), timeout=60)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_argument")
    assert "50000 entries" in refused.json()["message"]


async def test_a_client_that_leaves_in_the_middle_of_a_form() -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
    messages = [
        {"type": "http.request", "body": head, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/files",
        "query_string": b"path=a",
        "headers": [(b"content-type", b"multipart/form-data; boundary=b")],
    }

    async def write_file(path: str, source: AsyncIterator[bytes], *, user: str) -> None:
        async for _ in source:
            pass

    sandbox = SimpleNamespace(write_file=write_file)
    record = cast(
        "SandboxRecord", SimpleNamespace(disk_bytes=1 << 20, sandbox=sandbox, default_cwd=None)
    )
    request = Request(scope, receive)
    with pytest.raises(ClientDisconnect):
        await upload(record, request, Body(request, 1 << 20, ApiError(507, "too long")), "user")
