# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import io
import os
import time
from typing import TYPE_CHECKING

import pytest
from e2b import (
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    Sandbox,
    SandboxException,
)

from .conftest import http

if TYPE_CHECKING:
    from conftest import Server


def test_text_round_trip_makes_parents(sandbox: Sandbox) -> None:
    info = sandbox.files.write("a/b/c.txt", "grüße\n")
    assert info.path.endswith("/home/user/a/b/c.txt")
    assert sandbox.files.read("a/b/c.txt") == "grüße\n"
    assert sandbox.files.read(info.path) == "grüße\n"
    assert sandbox.commands.run("cat a/b/c.txt").stdout == "grüße\n"


def test_overwrite_shortens(sandbox: Sandbox) -> None:
    sandbox.files.write("f", "long content")
    sandbox.files.write("f", "short")
    assert sandbox.files.read("f") == "short"


def test_empty_file(sandbox: Sandbox) -> None:
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""


def test_one_megabyte_of_binary(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 20)
    sandbox.files.write("blob", data)
    assert bytes(sandbox.files.read("blob", format="bytes")) == data


def test_streams_in_both_directions(sandbox: Sandbox) -> None:
    data = os.urandom(5_000_003)
    sandbox.files.write("blob", io.BytesIO(data))
    assert b"".join(sandbox.files.read("blob", format="stream")) == data


def test_gzip_upload(sandbox: Sandbox) -> None:
    data = b"compress me " * 100_000
    sandbox.files.write("blob", data, gzip=True)
    assert bytes(sandbox.files.read("blob", format="bytes")) == data


def test_several_files_at_once(sandbox: Sandbox) -> None:
    written = sandbox.files.write_files(
        [{"path": "x/1", "data": "one"}, {"path": "x/2", "data": b"\x00two"}]
    )
    assert [info.name for info in written] == ["1", "2"]
    assert sandbox.files.read("x/1") == "one"
    assert bytes(sandbox.files.read("x/2", format="bytes")) == b"\x00two"


def test_missing_file(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("missing")
    assert not sandbox.files.exists("missing")


def test_a_directory_is_not_read(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("d")
    with pytest.raises(InvalidArgumentException, match="directory"):
        sandbox.files.read("d")
    with pytest.raises(InvalidArgumentException, match="directory"):
        sandbox.files.write("d", "x")


def test_a_device_and_a_fifo_are_refused_at_once(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkfifo pipe")
    for path in ("/dev/zero", "pipe"):
        with pytest.raises(InvalidArgumentException, match="regular"):
            sandbox.files.read(path)
    with pytest.raises(InvalidArgumentException, match="regular"):
        sandbox.files.write("pipe", "x")


def test_list_and_depth(sandbox: Sandbox) -> None:
    sandbox.files.write("t/a.txt", "1")
    sandbox.files.write("t/sub/b.txt", "22")
    sandbox.commands.run("ln -s a.txt t/link")
    flat = {entry.name: entry for entry in sandbox.files.list("t")}
    assert set(flat) == {"a.txt", "sub", "link"}
    assert flat["a.txt"].type == FileType.FILE
    assert flat["a.txt"].size == 1
    assert flat["sub"].type == FileType.DIR
    assert flat["link"].symlink_target == "a.txt"
    deep = [entry.path for entry in sandbox.files.list("t", depth=2)]
    assert any(path.endswith("/t/sub/b.txt") for path in deep)


def test_a_long_list_is_whole(sandbox: Sandbox) -> None:
    sandbox.commands.run(
        "mkdir many; cd many; for i in $(seq 1 3000); do : > file-$i; done", timeout=60
    )
    assert len(sandbox.files.list("many")) == 3000


def test_names_that_are_no_text_do_not_hide_the_others(sandbox: Sandbox) -> None:
    sandbox.commands.run(r"mkdir odd; cd odd; touch good $'b\xffd'; ln -s $'\xfe' link")
    with_watch = sandbox.files.watch_dir("odd")
    assert sorted(entry.name for entry in sandbox.files.list("odd")) == ["b\ufffdd", "good", "link"]
    assert sandbox.files.get_info("odd/link").symlink_target == "\ufffd"
    sandbox.commands.run(r"touch odd/$'new\xff'")
    deadline = time.monotonic() + 20
    seen: list[str] = []
    while "new\ufffd" not in seen:
        assert time.monotonic() < deadline
        seen += [event.name for event in with_watch.get_new_events()]


def test_list_errors(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundException):
        sandbox.files.list("nowhere")
    sandbox.files.write("plain", "x")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        sandbox.files.list("plain")


def test_info(sandbox: Sandbox) -> None:
    sandbox.files.write("f", "abc")
    sandbox.commands.run("chmod 640 f")
    info = sandbox.files.get_info("f")
    assert (info.name, info.size, info.mode, info.permissions) == ("f", 3, 0o640, "-rw-r-----")
    assert abs(info.modified_time.timestamp() - time.time()) < 60


def test_rename_remove_mkdir_exists(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("one/two")
    assert not sandbox.files.make_dir("one/two")
    sandbox.files.write("one/two/f", "x")
    assert sandbox.files.rename("one/two", "three").path.endswith("/three")
    assert not sandbox.files.exists("one/two")
    assert sandbox.files.read("three/f") == "x"
    sandbox.files.remove("three")
    assert not sandbox.files.exists("three")
    sandbox.files.remove("three")  # removed already
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename("missing", "else")


def test_watch(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("w")
    handle = sandbox.files.watch_dir("w")
    sandbox.files.write("w/new.txt", "x")
    sandbox.files.remove("w/new.txt")
    seen: set[tuple[str, str]] = set()
    deadline = time.monotonic() + 10
    while {("new.txt", "create"), ("new.txt", "remove")} - seen:
        assert time.monotonic() < deadline, seen
        seen |= {(event.name, event.type.value) for event in handle.get_new_events()}
        time.sleep(0.02)
    handle.stop()


def test_recursive_watch_sees_new_directories(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("w")
    handle = sandbox.files.watch_dir("w", recursive=True)
    sandbox.files.make_dir("w/sub")
    seen: set[str] = set()
    deadline = time.monotonic() + 10
    count = 0
    while "sub/deep.txt" not in seen:
        assert time.monotonic() < deadline, seen
        sandbox.files.write("w/sub/deep.txt", str(count))
        count += 1
        seen |= {event.name for event in handle.get_new_events()}
    handle.stop()


def test_lost_events_are_said_so(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("w")
    churn = "import os\nfor _ in range(20000): open('w/f', 'w').close(); os.unlink('w/f')\n"
    sandbox.files.write("churn.py", churn)
    handle = sandbox.files.watch_dir("w")
    sandbox.commands.run("python3 churn.py", timeout=60)
    deadline = time.monotonic() + 30
    with pytest.raises(SandboxException, match="events were lost"):
        while time.monotonic() < deadline:
            assert len(handle.get_new_events()) < 20000
            time.sleep(0.1)
    handle.get_new_events()
    handle.stop()


async def test_streamed_watch(server: Server) -> None:
    import asyncio

    from e2b import AsyncSandbox

    sandbox = await AsyncSandbox.create("base", timeout=60, **server.opts)
    try:
        await sandbox.files.make_dir("w")
        events: asyncio.Queue[str] = asyncio.Queue()
        handle = await sandbox.files.watch_dir(
            "w", on_event=lambda event: events.put_nowait(event.name)
        )
        await sandbox.files.write("w/f", "x")
        assert await asyncio.wait_for(events.get(), 10) == "f"
        await handle.stop()
    finally:
        await sandbox.kill()


def test_watch_of_a_missing_directory(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundException):
        sandbox.files.watch_dir("nowhere")


def test_a_full_disk_is_said_so(server: Server, sandbox: Sandbox) -> None:
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("big", b"x" * (65 << 20))
    sandbox.files.remove("big")
    assert sandbox.files.write("small", "x").name == "small"


def test_signed_urls(sandbox: Sandbox) -> None:

    sandbox.files.write("f", "signed")
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    url = sandbox.download_url("f", use_signature_expiration=60)
    assert http.get(url, headers=headers).text == "signed"
    assert (
        http.get(url.replace("signature=v1_", "signature=v1_x"), headers=headers).status_code == 401
    )
    assert http.get(url.partition("?")[0] + "?path=f", headers=headers).status_code == 401
