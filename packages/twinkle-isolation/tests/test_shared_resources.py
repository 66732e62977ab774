"""What the host has one number of for all sandboxes: one of them gets a share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twinkle_isolation import GuestError, Launcher, Limits, Sandbox, SandboxSpec

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = ["python3", "-c"]
LARGE = SandboxSpec(limits=Limits(memory_bytes=512 << 20, disk_bytes=256 << 20, open_files=1024))


@pytest.mark.parametrize("user", ["user", "root"])
@pytest.mark.parametrize(
    ("most", "call"),
    [(64, "os.openpty()"), (16, "ctypes.CDLL(None).inotify_init() >= 0 or int('')")],
    ids=["terminals", "inotify"],
)
async def test_a_share_of_what_the_kernel_has_for_all(
    jailed: Launcher, most: int, call: str, user: str
) -> None:
    program = (
        "import ctypes, os\n"
        "made = 0\n"
        "try:\n"
        "    while made < 400: made += 1 if (" + call + ") is not None else 0\n"
        "except (OSError, ValueError): pass\n"
        "print(made)"
    )
    async with await jailed.create(LARGE) as sandbox:
        result = await sandbox.exec([*PYTHON, program], user=user)
    assert 4 <= int(result.stdout) <= most, result.stderr


async def test_a_listing_is_bounded_by_its_bytes(jailed: Launcher) -> None:
    program = "for i in range(17000): open(f'{i:0255d}', 'w').close()"
    async with await jailed.create(LARGE) as sandbox:
        made = await sandbox.exec([*PYTHON, program], timeout_s=60)
        assert made.end.exit_code == 0, made.stderr
        with pytest.raises(GuestError, match="8 MiB of names"):
            await sandbox.list_dir(".")


async def test_the_root_cannot_be_moved(sandbox: Sandbox) -> None:
    with pytest.raises(GuestError) as refused:
        await sandbox.move("/", "elsewhere")
    assert refused.value.code != "internal"


@pytest.mark.parametrize("depth", [1500, 5000])
async def test_many_parents_are_made_or_refused(sandbox: Sandbox, depth: int) -> None:
    path = "d/" * depth + "f"
    if len(path) > 4096:
        with pytest.raises(GuestError) as refused:
            await sandbox.write_file(path, b"deep")
        assert refused.value.code == "invalid_argument"
    else:
        await sandbox.write_file(path, b"deep")
        assert await sandbox.read_file(path) == b"deep"


async def test_deep_directories_are_saved_and_restored(
    launcher: Launcher, sandbox: Sandbox, tmp_path: Path
) -> None:
    program = (
        "import os\n"
        "for _ in range(1300): os.mkdir('d'); os.chdir('d')\n"
        "open('f', 'w').write('deep')"
    )
    made = await sandbox.exec([*PYTHON, program])
    assert made.end.exit_code == 0, made.stderr
    await sandbox.pause()
    archive = tmp_path / "files.tar"
    archive.write_bytes(b"".join([piece async for piece in sandbox.snapshot(timeout_s=60)]))
    async with await launcher.create(archive=archive) as copy:
        found = await copy.exec(["find", ".", "-name", "f"])
        assert found.stdout.count(b"/d") == 1300


async def test_no_program_plants_a_module_for_the_supervisor(jailed: Launcher) -> None:
    async with await jailed.create() as sandbox:
        for path in ("/run/twinkle/lib/planted.py", "/run/twinkle/lib/twinkle_isolation/later.py"):
            text = "def main(): open('/tmp/imported', 'w').close()\n"
            await sandbox.write_file(path, text.encode())
        for function in ("planted:main", "twinkle_isolation.later:main"):
            try:
                process = await sandbox.start_python(function)
                await process.wait()
            except GuestError:
                pass
        with pytest.raises(GuestError, match="No such file"):
            await sandbox.stat("/tmp/imported")
