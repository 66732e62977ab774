"""What a sandbox leaves is removed, whatever it looks like."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twinkle_isolation import Launcher
from twinkle_isolation.scratch import make_scratch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinkle_isolation import Sandbox

# Deeper than Python's stack, longer than a path may be; a link out of it; and a closed directory.
MAKE = r"""
import os, sys
os.makedirs("mine/closed/inner")
os.symlink(os.getcwd(), "mine/out")
open("mine/closed/inner/file", "w").close()
if "close" in sys.argv:
    os.chmod("mine/closed/inner", 0)
    os.chmod("mine/closed", 0)
os.chdir("mine")
for _ in range(3000):
    os.mkdir("a-directory")
    os.chdir("a-directory")
open("leaf", "w").close()
"""


async def test_a_deep_directory_is_removed(sandbox: Sandbox) -> None:
    made = await sandbox.exec(["python3", "-c", MAKE], timeout_s=60)
    assert made.end.exit_code == 0, made.stderr
    await sandbox.write_file("beside", b"stays")
    await sandbox.remove("mine")
    assert [entry.name for entry in await sandbox.list_dir(".")] == ["beside"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the users of sandboxes can reach."""
    found = Path(tempfile.mkdtemp(prefix="trees-"))
    found.chmod(0o711)
    yield found
    subprocess.run(["rm", "-rf", str(found)], check=True)


async def test_nothing_of_a_sandbox_outlives_its_launcher(place: Path) -> None:
    async with Launcher(isolation="process", data_dir=place) as launcher:
        sandboxes = [await launcher.create() for _ in range(2)]
        for sandbox in sandboxes:
            made = await sandbox.exec(["python3", "-c", MAKE, "close"], timeout_s=60)
            assert made.end.exit_code == 0, made.stderr
        await sandboxes[0].kill()
    assert os.listdir(place) == []


def test_what_a_killed_process_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = 2**22 + 1  # beyond the largest process id
    left = tmp_path / f"twinkle-things-{nobody}-x"
    left.mkdir()
    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.chdir(left)
    os.symlink(kept, "out")
    for _ in range(3000):
        os.mkdir("a-directory")
        os.chdir("a-directory")
    os.chdir(tmp_path)
    fresh = make_scratch("things", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([fresh, kept])
