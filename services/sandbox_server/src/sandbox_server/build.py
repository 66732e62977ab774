"""Build a template: run its steps in a sandbox, then keep the files."""

from __future__ import annotations

import asyncio
import posixpath
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from sandbox_server.copies import save_files
from sandbox_server.errors import ApiError
from sandbox_server.models import Environment, Message, Text
from sandbox_server.record import SandboxRecord
from sandbox_server.templates import BuildState, Template
from twinkle_isolation import GuestError, GuestProcess, SandboxLostError

if TYPE_CHECKING:
    from sandbox_server.registry import Registry

_STEP_TIMEOUT_S = 1800.0
_BUILD_TIMEOUT_S = 3600.0
_READY_TIMEOUT_S = 300.0
_READY_TRY_TIMEOUT_S = 30.0
_READY_INTERVAL_S = 0.2
_IGNORED = {"EXPOSE", "VOLUME", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"}


class _Variables(Message):
    env: Environment


class Step(Message):
    """One step of a build: its kind, in capitals, and its arguments."""

    type: Annotated[Text, AfterValidator(str.upper)] = ""
    args: list[Text] = Field(default=[])

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind, args = self.type, self.args
        if kind in ("COPY", "ADD"):
            raise ValueError(f"{kind} steps are not supported: write the files with RUN")
        if kind not in {"RUN", "ENV", "ARG", "WORKDIR", "USER", *_IGNORED}:
            raise ValueError(f"step type {kind!r} is unknown")
        if kind in ("RUN", "WORKDIR", "USER") and not args:
            raise ValueError(f"step {kind} needs an argument")
        if kind == "ENV" and len(args) % 2:
            raise ValueError("step ENV needs pairs of name and value")
        _Variables(env=self.variables())
        return self

    def variables(self) -> dict[str, str]:
        """Return the environment variables that the step sets."""
        if self.type == "ENV":
            return dict(zip(self.args[::2], self.args[1::2], strict=True))
        if self.type == "ARG" and self.args and "=" in self.args[0]:
            return dict([self.args[0].split("=", 1)])
        return {}


class BuildRequest(Message):
    """What to build: where from, the steps, and the command that runs in every sandbox."""

    from_template: Text | None = None
    steps: list[Step] = Field(default=[])
    start_cmd: Text | None = None
    ready_cmd: Text | None = None


class _StepError(Exception):
    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step


async def run_build(registry: Registry, build: BuildState, wanted: BuildRequest) -> None:
    """Run a build to its end; the result is in `build`."""
    record: SandboxRecord | None = None
    try:
        async with asyncio.timeout(_BUILD_TIMEOUT_S):
            base = registry.templates.get(wanted.from_template or registry.config.templates[0], 400)
            if wanted.from_template is None:
                build.log("the image is not used: sandboxes of this server see the host's programs")
            record = await registry.launch(
                base,
                env={},
                network=registry.config.network,
                timeout_s=_BUILD_TIMEOUT_S,
                metadata={"twinkle.build": build.build_id},
                secure=True,
                run_start_cmd=False,
            )
            await _build(registry, build, wanted, base, record)
        build.log("the template is ready")
        build.status = "ready"
    except _StepError as error:
        _fail(build, str(error), error.step)
    except TimeoutError:
        _fail(build, f"the build took longer than {_BUILD_TIMEOUT_S:g} s", None)
    except (ApiError, GuestError, SandboxLostError) as error:
        _fail(build, str(error), None)
    except asyncio.CancelledError:
        _fail(build, "the build was cancelled", None)
        raise
    except Exception as error:
        _fail(build, f"internal error: {type(error).__name__}: {error}", None)
        raise
    finally:
        if record is not None:
            await registry.kill(record)


def _fail(build: BuildState, message: str, step: str | None) -> None:
    build.log(message, level="error", step=step)
    build.reason = {"message": message[:2000], **({} if step is None else {"step": step})}
    build.status = "error"


async def _build(
    registry: Registry,
    build: BuildState,
    wanted: BuildRequest,
    base: Template,
    record: SandboxRecord,
) -> None:
    for number, each in enumerate(wanted.steps, start=1):
        step, kind, args = str(number), each.type, each.args
        build.log(f"[{number}/{len(wanted.steps)}] {kind} {' '.join(args)}", step=step)
        if kind == "RUN":
            user = args[1] if len(args) > 1 and args[1] else record.default_user
            await _run(build, record, args[0], user, step)
        elif kind == "WORKDIR":
            await _set_workdir(record, args[0], step)
        elif kind == "USER":
            if args[0] not in ("user", "root"):
                raise _StepError(step, f"user {args[0]!r} not found: the users are user and root")
            record.default_user = args[0]
        else:
            record.env.update(each.variables())
    if wanted.start_cmd:
        process = await record.start_shell(wanted.start_cmd)
        process.detach()
        await _wait_ready(build, record, wanted.ready_cmd, process)
    template = registry.templates.find(build.template_id)
    if template is None:
        raise ApiError(404, f"template {build.template_id!r} was deleted during its build")
    archive = await save_files(registry, record)
    old = replace(template)
    template.archive = archive
    template.env = dict(record.env)
    template.user = record.default_user
    template.workdir = record.default_cwd
    template.start_cmd = wanted.start_cmd or base.start_cmd
    template.memory_mb = build.memory_mb
    template.cpu_count = build.cpu_count
    template.build_id = build.build_id
    template.build_count += 1
    template.updated_at = time.time()
    template.ready = True
    try:
        registry.templates.save(template)
    except ApiError:
        vars(template).update(vars(old))
        (registry.templates.directory / archive).unlink(missing_ok=True)
        raise
    if old.archive is not None:
        (registry.templates.directory / old.archive).unlink(missing_ok=True)


async def _run(
    build: BuildState, record: SandboxRecord, command: str, user: str, step: str
) -> None:
    result = await record.run_shell(command, timeout_s=_STEP_TIMEOUT_S, user=user)
    for text in (result.stdout, result.stderr):
        for line in text.decode(errors="replace").splitlines():
            build.log(line, step=step)
    if result.end.reason is not None:
        raise _StepError(step, f"{command!r} was killed: {result.end.reason} limit")
    if result.end.exit_code != 0:
        raise _StepError(step, f"{command!r} ended with exit code {result.end.exit_code}")


async def _set_workdir(record: SandboxRecord, path: str, step: str) -> None:
    start = record.default_cwd or ("/root" if record.default_user == "root" else "/home/user")
    target = posixpath.normpath(posixpath.join(start, path))
    try:
        await record.sandbox.make_dir(target, user=record.default_user)
    except GuestError as error:
        if error.code != "already_exists":
            raise _StepError(step, f"WORKDIR {path!r}: {error.message}") from error
    record.default_cwd = target


async def _wait_ready(
    build: BuildState, record: SandboxRecord, command: str | None, process: GuestProcess
) -> None:
    if not command:
        await asyncio.sleep(_READY_INTERVAL_S)
        return
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline:
        result = await record.run_shell(command, timeout_s=_READY_TRY_TIMEOUT_S)
        if result.end.exit_code == 0:
            return
        await asyncio.sleep(_READY_INTERVAL_S)
    raise _StepError(
        "finalize", f"the ready command {command!r} did not succeed in {_READY_TIMEOUT_S:g} s"
    )
