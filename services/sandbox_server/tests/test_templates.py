"""What a server keeps in `--data-dir`, and what it leaves alone there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sandbox_server.templates import DataDirInUseError, Template, TemplateStore, new_id
from twinkle_isolation import SandboxLostError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


def open_store(directory: Path) -> TemplateStore:
    return TemplateStore(directory, limit=10, base_names=("base",))


def test_files_that_are_not_the_servers_stay(tmp_path: Path) -> None:
    for name in ("backup.tar.gz", "backup.tar", "notes.json", f"{new_id()}.tar"):
        (tmp_path / name).write_text("mine")
    store = open_store(tmp_path)
    part = store.directory / f"{new_id()}.tar.part"
    kept = [store.directory / f"{new_id()}.tar", store.directory / "backup.tar.part"]
    for path in (part, *kept):
        path.write_text("x")
    store.close()
    open_store(tmp_path).close()
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 4
    assert not part.exists()
    assert all(path.exists() for path in kept)


def test_what_cannot_be_read_is_kept_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    template = Template(template_id=new_id(), is_snapshot=True, ready=True)
    template.archive = f"{new_id()}.tar"
    (store.directory / template.archive).write_text("files")
    store.save(template)
    store.close()
    path = store.directory / f"{template.template_id}.json"
    values = json.loads(path.read_text())
    for broken in (
        json.dumps(values | {"of_a_later_version": 1}),
        "{",
        json.dumps(values | {"archive": "../x"}),
    ):
        path.write_text(broken)
        caplog.clear()
        store = open_store(tmp_path)
        assert store.all(snapshots=True) == []
        assert path.name in caplog.text
        assert (store.directory / template.archive).read_text() == "files"
        store.close()
    path.write_text(json.dumps(values))
    store = open_store(tmp_path)
    assert [t.template_id for t in store.all(snapshots=True)] == [template.template_id]
    store.close()


def test_a_second_server_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(DataDirInUseError, match="another server"):
        open_store(tmp_path)
    command = [sys.executable, "-m", "sandbox_server", "--port", "0", "--data-dir", str(tmp_path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert "another server" in " ".join(second.stderr.split())
    store.close()
    open_store(tmp_path).close()


async def test_a_sandbox_lost_while_it_is_saved_is_no_full_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"x"
        raise SandboxLostError("the sandbox has ended")

    with pytest.raises(SandboxLostError):
        await store.store_archive(pieces(), 100)
    assert list(store.directory.glob("*.tar*")) == []
    store.close()
