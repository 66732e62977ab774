"""Templates and snapshots: a saved file tree, and how programs in it start."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sandbox_server.errors import ApiError
from twinkle_isolation import SandboxLostError
from twinkle_isolation.scratch import make_scratch

logger = logging.getLogger(__name__)

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_DIRECTORY = "sandbox-server-templates"
_ARCHIVE = re.compile(r"[a-z0-9]{20}\.tar")
_PART = re.compile(r"[a-z0-9]{20}\.(tar|json)\.part")
_MAX_LOG_LINES = 10_000
_MAX_LOG_BYTES = 512 << 10  # of one build
_MAX_LINE = 2000
_MAX_BUILDS = 200


def new_id(length: int = 20) -> str:
    """Return a random id in the form of E2B's."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


@dataclass(kw_only=True)
class Template:
    """What sandboxes start from. Without `archive` it is the bare host."""

    template_id: str
    names: list[str] = field(default_factory=lambda: list[str]())
    tags: list[str] = field(default_factory=lambda: list[str]())
    is_snapshot: bool = False
    source_sandbox_id: str | None = None
    ready: bool = False
    archive: str | None = None  # a file name in the store's directory
    env: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    user: str = "user"
    workdir: str | None = None
    start_cmd: str | None = None
    memory_mb: int | None = None
    cpu_count: int | None = None
    build_id: str = ""
    created_at: float = field(default_factory=time.time)
    updated_at: float = field(default_factory=time.time)
    spawn_count: int = 0
    build_count: int = 0


@dataclass(kw_only=True)
class BuildState:
    """One build: its state and what it printed."""

    template_id: str
    build_id: str
    memory_mb: int | None = None
    cpu_count: int | None = None
    status: Literal["waiting", "building", "ready", "error"] = "waiting"
    reason: dict[str, Any] | None = None
    logs: list[dict[str, Any]] = field(default_factory=lambda: list[dict[str, Any]]())
    task: asyncio.Task[None] | None = None
    log_bytes: int = 0

    def log(self, text: str, *, level: str = "info", step: str | None = None) -> None:
        """Add a line to what the build printed: 10,000 lines, 512 KiB, of a line 2,000 characters.

        Errors are always kept.
        """
        text = text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]} (cut)"
        full = len(self.logs) >= _MAX_LOG_LINES or self.log_bytes >= _MAX_LOG_BYTES
        if full and level != "error":
            return
        self.log_bytes += len(text.encode(errors="replace"))
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        entry: dict[str, Any] = {"timestamp": f"{moment}Z", "message": text, "level": level}
        if step is not None:
            entry["step"] = step
        self.logs.append(entry)


class DataDirInUseError(RuntimeError):
    """Another server keeps its templates there."""


class TemplateStore:
    """All templates of one server, in a directory of their own.

    Raises:
        DataDirInUseError: Another server uses it.
    """

    def __init__(self, directory: Path | None, *, limit: int, base_names: tuple[str, ...]) -> None:
        self._temporary = directory is None
        self.directory = make_scratch("templates") if directory is None else directory / _DIRECTORY
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        self._limit = limit
        self._templates: dict[str, Template] = {}
        self.builds: dict[str, BuildState] = {}
        for name in base_names:
            self._templates[name] = Template(template_id=name, names=[name], ready=True)
        self._lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DataDirInUseError(
                f"data_dir {str(directory)!r} is used by another server: give each its own"
            ) from error
        self._load()

    def _load(self) -> None:
        for path in self.directory.iterdir():
            if _PART.fullmatch(path.name):
                path.unlink(missing_ok=True)  # of a server that was killed while it wrote
        known: set[str | None] = set()
        for path in self.directory.glob("*.json"):
            try:
                template = self._read(path)
            except (ValueError, TypeError, OSError) as error:
                logger.warning("%s is kept and not used: %s", path, error)
            else:
                self._templates[template.template_id] = template
                known.add(template.archive)
        for path in self.directory.glob("*.tar"):
            if path.name not in known:
                logger.warning("%s is kept and not used: no template names it", path)

    def _read(self, path: Path) -> Template:
        template = Template(**json.loads(path.read_text()))
        if template.template_id != path.stem:
            raise ValueError(f"it is about template {template.template_id!r}")
        if template.archive is not None:
            if not _ARCHIVE.fullmatch(template.archive):
                raise ValueError(f"archive {template.archive!r} is no file of this server")
            if not (self.directory / template.archive).exists():
                raise ValueError(f"archive {template.archive!r} is missing")
        return template

    def close(self) -> None:
        """Remove a temporary directory; another server may use one that is kept. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for build in self.builds.values():
            if build.task is not None:
                build.task.cancel()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def all(self, *, snapshots: bool) -> list[Template]:
        """Return the templates (or the snapshots), oldest first."""
        return [t for t in self._templates.values() if t.is_snapshot == snapshots]

    def add_build(self, build: BuildState) -> None:
        """Hold a build; of more than 200 the oldest that are not running are forgotten."""
        for old in list(self.builds.values()):
            if len(self.builds) < _MAX_BUILDS:
                break
            if old.status != "building":
                del self.builds[old.build_id]
        self.builds[build.build_id] = build

    def find(self, name: str) -> Template | None:
        """Return a template by its id or a name, with or without a known tag."""
        base, _, tag = name.partition(":")
        for candidate in (name, base) if tag else (name,):
            found = self._templates.get(candidate) or next(
                (t for t in self._templates.values() if candidate in t.names), None
            )
            if found is not None and (candidate == name or tag in ("default", *found.tags)):
                return found
        return None

    def get(self, name: str, status: int = 404) -> Template:
        """Return a template that sandboxes can start from."""
        template = self.find(name)
        if template is None:
            known = sorted({n for t in self.all(snapshots=False) for n in t.names})[:20]
            raise ApiError(
                status, f"template {name!r} not found: build it first, or use one of {known}"
            )
        if not template.ready:
            raise ApiError(400, f"template {name!r} is not built: wait until its build is ready")
        return template

    def add(self, template: Template) -> None:
        """Hold a template. Raises 429."""
        if template.template_id not in self._templates and len(self._templates) >= self._limit:
            raise ApiError(
                429,
                f"{self._limit} templates and snapshots exist already: delete some",
                retry_after_s=5,
            )
        self._templates[template.template_id] = template

    def save(self, template: Template) -> None:
        """Write what a later server needs. Raises 507."""
        path = self.directory / f"{template.template_id}.json"
        part = path.with_suffix(".json.part")
        try:
            part.write_text(json.dumps(asdict(template)))
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise ApiError(507, f"the template could not be written: {error}") from error

    def delete(self, template: Template) -> None:
        """Forget a template and remove its files."""
        self._templates.pop(template.template_id, None)
        for build_id, build in list(self.builds.items()):
            if build.template_id == template.template_id:
                if build.task is not None:
                    build.task.cancel()
                del self.builds[build_id]
        (self.directory / f"{template.template_id}.json").unlink(missing_ok=True)
        if template.archive is not None:
            (self.directory / template.archive).unlink(missing_ok=True)

    def archive_path(self, template: Template) -> Path | None:
        """Return the file with the template's files."""
        return None if template.archive is None else self.directory / template.archive

    async def store_archive(
        self, data: AsyncGenerator[bytes, None], limit: int, *, keep: bool = True
    ) -> str:
        """Write an archive; return its file name. One that is not to `keep` the caller removes.

        Raises:
            ApiError: It is longer than `limit` (413), or the disk is full (507).
            SandboxLostError: The sandbox ended before `data` did.
            GuestError: The sandbox could not give `data`.
        """
        name = f"{new_id()}.tar"
        path = self.directory / f"{name}.part"
        size = 0
        done = False
        try:
            with path.open("wb") as file:
                async with contextlib.aclosing(data) as pieces:
                    async for piece in pieces:
                        size += len(piece)
                        if size > limit:
                            raise ApiError(413, f"the files are longer than {limit} bytes")
                        # Into the page cache, so not worth a thread.
                        file.write(piece)
            if keep:
                os.replace(path, self.directory / name)
            done = True
        except SandboxLostError:
            raise  # it is a ConnectionError, and so an OSError
        except OSError as error:
            raise ApiError(507, f"the snapshot could not be written: {error}") from error
        finally:
            if not done:
                path.unlink(missing_ok=True)
        return name if keep else path.name
