"""Templates that change while sandboxes start from them, and a disk that is full meanwhile."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import e2b
import pytest

from sandbox_server.build import BuildRequest, run_build
from sandbox_server.config import ServerConfig
from sandbox_server.copies import fork, snapshot
from sandbox_server.errors import ApiError
from sandbox_server.templates import BuildState, Template, TemplateStore, new_id
from twinkle_isolation import SandboxLostError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

    from conftest import Server

    from sandbox_server.record import SandboxRecord
    from sandbox_server.registry import Registry


class FilledUp:
    """A sandbox after whose files nothing more fits into the store."""

    def __init__(self, store: TemplateStore, template_id: Callable[[], str]) -> None:
        self.store = store
        self.template_id = template_id

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def snapshot(self) -> AsyncGenerator[bytes, None]:
        yield b"files"
        # A directory of the name that the description is written under stands for the full disk.
        (self.store.directory / f"{self.template_id()}.json.part").mkdir()


class Lost(FilledUp):
    """A sandbox that is killed when its files have been saved."""

    async def snapshot(self) -> AsyncGenerator[bytes, None]:
        yield b"files"

    async def resume(self) -> None:
        raise SandboxLostError("the sandbox has ended: it was killed")


class Rig:
    """What a snapshot and a build need of a server, around a real store."""

    def __init__(self, directory: Path) -> None:
        self.templates = TemplateStore(directory, limit=10, base_names=("base",))
        self.config = ServerConfig()
        self.record = SimpleNamespace(
            sandbox_id="s",
            template_id="base",
            alias=None,
            sandbox=FilledUp(self.templates, lambda: self.newest().template_id),
            env={"NEW": "1"},
            default_user="user",
            default_cwd=None,
            memory_bytes=1 << 20,
            lock=asyncio.Lock(),
            state="running",
        )

    def newest(self) -> Template:
        return [*self.templates.all(snapshots=False), *self.templates.all(snapshots=True)][-1]

    async def launch(self, *args: Any, **options: Any) -> Any:
        return self.record

    async def kill(self, record: object) -> None: ...


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)
    yield found
    found.templates.close()


async def test_a_snapshot_that_does_not_fit_leaves_nothing(rig: Rig) -> None:
    with pytest.raises(ApiError) as refused:
        await snapshot(cast("Registry", rig), cast("SandboxRecord", rig.record), [])
    assert refused.value.status == 507
    assert rig.templates.all(snapshots=True) == []
    assert list(rig.templates.directory.glob("*.tar")) == []


async def test_a_sandbox_that_is_lost_when_its_files_are_saved_leaves_none(rig: Rig) -> None:
    rig.record.sandbox = Lost(rig.templates, str)
    registry, record = cast("Registry", rig), cast("SandboxRecord", rig.record)
    with pytest.raises(ApiError, match="not found"):
        await snapshot(registry, record, [])
    with pytest.raises(ApiError, match="not found"):
        await fork(registry, record, 2, 60)
    assert list(rig.templates.directory.glob("*.tar*")) == []
    assert rig.templates.all(snapshots=True) == []


async def test_a_build_that_does_not_fit_changes_nothing(rig: Rig) -> None:
    template = Template(template_id=new_id(), names=["mine"], ready=True, env={"OLD": "1"})
    template.archive = f"{new_id()}.tar"
    (rig.templates.directory / template.archive).write_text("old files")
    rig.templates.add(template)
    before = repr(template)
    build = BuildState(template_id=template.template_id, build_id="b")
    await run_build(cast("Registry", rig), build, BuildRequest(from_template="base"))
    assert build.status == "error"
    assert "No space" in str(build.reason) or "could not be written" in str(build.reason)
    assert repr(template) == before
    assert [path.name for path in rig.templates.directory.glob("*.tar")] == [template.archive]


def test_sandboxes_start_while_their_template_is_built_anew(start: Callable[..., Server]) -> None:
    server = start("process", "--spares", "0")
    params = {key: value for key, value in server.opts.items() if key != "sandbox_url"}

    def build(number: int) -> None:
        steps = e2b.Template().from_image("x").run_cmd(f"echo {number} > number")
        e2b.Template.build(steps.set_envs({"NUMBER": str(number)}), "anew", **params)

    build(0)
    over = threading.Event()
    wrong: list[str] = []

    def create() -> None:
        while not over.is_set():
            try:
                sandbox = e2b.Sandbox.create("anew", timeout=60, **server.opts)
                text = sandbox.commands.run("echo $(cat number) $NUMBER").stdout
                if len(set(text.split())) != 1:
                    wrong.append(text)
                sandbox.kill()
            except Exception as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=create) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 4):
            build(number)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert wrong == []
