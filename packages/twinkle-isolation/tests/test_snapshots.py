"""Snapshots of files that are hard to read, and of sandboxes that do not want to be read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from twinkle_isolation import GuestError, Launcher, Sandbox

if TYPE_CHECKING:
    from pathlib import Path

BASH = ["/bin/bash", "-c"]


async def save(sandbox: Sandbox, archive: Path, *, timeout_s: float = 60) -> None:
    await sandbox.pause()
    pieces = [piece async for piece in sandbox.snapshot(timeout_s=timeout_s)]
    await asyncio.to_thread(archive.write_bytes, b"".join(pieces))
    await sandbox.resume()


async def test_modes_do_not_keep_files_out_of_a_snapshot(
    launcher: Launcher, sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.exec(
        [
            *BASH,
            "mkdir -p a/b shut/deep; echo x > a/b/f; echo y > shut/deep/g; echo z > none;"
            " ln none same; chmod 000 none; chmod 555 a a/b; chmod 000 shut/deep; chmod 111 shut",
        ]
    )
    archive = tmp_path / "files.tar"
    await save(sandbox, archive)
    async with await launcher.create(archive=archive) as copy:
        for box in (sandbox, copy):
            for path, mode in (("a", 0o555), ("a/b", 0o555), ("shut", 0o111), ("none", 0)):
                assert (await box.stat(path)).mode == mode, path
        assert await copy.read_file("a/b/f") == b"x\n"
        assert (await copy.stat("shut/deep")).mode == 0
        opened = await copy.exec(
            [*BASH, "chmod 700 shut/deep shut; chmod 400 none; cat shut/deep/g same"]
        )
        assert opened.stdout == b"y\nz\n"


async def test_a_snapshot_that_takes_too_long_ends_and_the_sandbox_goes_on(
    sandbox: Sandbox,
) -> None:
    await sandbox.exec([*BASH, "head -c 9M /dev/zero > big"])
    await sandbox.pause()
    pieces = sandbox.snapshot(timeout_s=0.5)
    await anext(pieces)

    async def slowly() -> None:
        # It waits for room: nobody reads until its time is over.
        await asyncio.sleep(1.5)
        async for _ in pieces:
            pass

    with pytest.raises(GuestError, match=r"not read in 0\.5 s") as caught:
        await slowly()
    assert caught.value.code == "deadline_exceeded"
    await sandbox.resume()
    usage = await sandbox.usage()
    assert usage.processes == 0
    assert (await sandbox.exec(["true"])).end.exit_code == 0


async def test_a_snapshot_that_is_given_up_leaves_no_process(sandbox: Sandbox) -> None:
    await sandbox.exec([*BASH, "head -c 9M /dev/zero > big"])
    pieces = sandbox.snapshot()
    await anext(pieces)
    await pieces.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        while (await sandbox.usage()).processes:
            pass


async def test_what_cannot_be_read_is_named(launcher: Launcher, sandbox: Sandbox) -> None:
    # Deeper than a path may be long: nobody can name its end.
    deep = "import os\nfor _ in range(100):\n    os.mkdir('d' * 100); os.chdir('d' * 100)\n"
    await sandbox.exec(["python3", "-c", deep])
    with pytest.raises(GuestError, match=r"could not be read: .*ddd") as caught:
        async for _ in sandbox.snapshot():
            pass
    assert caught.value.code == "failed_precondition"
    assert (await sandbox.exec(["true"])).end.exit_code == 0
