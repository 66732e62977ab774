"""Copies of a sandbox's files: snapshots, and forks that start from one at once."""

from __future__ import annotations

import asyncio
import contextlib

from sandbox_server.errors import ApiError, as_api_error
from sandbox_server.record import SandboxRecord
from sandbox_server.registry import Registry
from sandbox_server.templates import Template, new_id
from twinkle_isolation import GuestError, SandboxLostError


async def snapshot(registry: Registry, record: SandboxRecord, names: list[str]) -> Template:
    """Save the files of a sandbox (no memory); its processes stand still meanwhile.

    Raises:
        ApiError: Too many snapshots (429), too long (413), no space (507), a file cannot be read
            (400), the files cannot be read in time (504), the sandbox is gone (404).
    """
    source = registry.templates.find(record.template_id)
    template = Template(
        template_id=new_id(),
        names=names,
        is_snapshot=True,
        source_sandbox_id=record.sandbox_id,
        env=dict(record.env),
        user=record.default_user,
        workdir=record.default_cwd,
        start_cmd=source.start_cmd if source else None,
        memory_mb=record.memory_bytes >> 20,
    )
    registry.templates.add(template)
    try:
        template.archive = await save_files(registry, record)
        template.ready = True
        registry.templates.save(template)
    except BaseException:
        registry.templates.delete(template)
        raise
    return template


async def save_files(registry: Registry, record: SandboxRecord, *, keep: bool = True) -> str:
    """Write the sandbox's files to an archive of the store; return its name.

    Its processes stand still meanwhile. One that is not to `keep` is removed by the next server
    when this one does not come to it.

    Raises:
        ApiError: Too long (413), no space (507), a file cannot be read (400), the files cannot be
            read in time (504), the sandbox is gone (404).
    """
    async with record.lock, contextlib.AsyncExitStack() as undo:
        try:
            await record.sandbox.pause()
            try:
                name = await registry.templates.store_archive(
                    record.sandbox.snapshot(), registry.config.max_snapshot_bytes, keep=keep
                )
                undo.callback((registry.templates.directory / name).unlink, missing_ok=True)
            finally:
                if record.state == "running":
                    await record.sandbox.resume()
            undo.pop_all()
            return name
        except (GuestError, SandboxLostError) as error:
            raise as_api_error(error, lost_status=404) from error


async def fork(
    registry: Registry, record: SandboxRecord, count: int, timeout_s: float
) -> list[SandboxRecord | ApiError]:
    """Make `count` sandboxes with the files of one; each succeeds or fails alone."""
    template = Template(
        template_id=record.template_id,
        names=[] if record.alias is None else [record.alias],
        ready=True,
        user=record.default_user,
        workdir=record.default_cwd,
        memory_mb=record.memory_bytes >> 20,
    )
    template.archive = await save_files(registry, record, keep=False)
    try:
        results = await asyncio.gather(
            *(
                registry.launch(
                    template,
                    env=dict(record.env),
                    network=record.allow_internet,
                    timeout_s=timeout_s,
                    metadata=dict(record.metadata),
                    secure=record.token is not None,
                    auto_pause=record.auto_pause,
                    auto_resume=record.auto_resume,
                )
                for _ in range(count)
            ),
            return_exceptions=True,
        )
    finally:
        (registry.templates.directory / template.archive).unlink(missing_ok=True)
    answers: list[SandboxRecord | ApiError] = []
    for result in results:
        if isinstance(result, Exception):
            answers.append(as_api_error(result, lost_status=404))
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append(result)
    return answers
