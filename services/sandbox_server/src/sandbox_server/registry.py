"""The sandboxes of one server: their lives from create to kill."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import logging
import secrets
import time
from dataclasses import replace
from typing import Any

from sandbox_server.config import ServerConfig
from sandbox_server.errors import ApiError
from sandbox_server.idempotency import IdempotencyKeys
from sandbox_server.metrics import Metrics
from sandbox_server.record import SandboxRecord
from sandbox_server.templates import Template, TemplateStore, new_id
from twinkle_isolation import (
    GuestError,
    Launcher,
    Limits,
    Sandbox,
    SandboxLostError,
    SandboxSpec,
    SandboxStartError,
)

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_RESUMED_TIMEOUT_S = 300.0
_START_SETTLE_S = 0.2
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS}


class Registry:
    """Everything that lives on one server."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.templates = TemplateStore(
            config.data_dir, limit=config.max_templates, base_names=config.templates
        )
        self.records: dict[str, SandboxRecord] = {}
        self._launcher = Launcher(
            isolation=config.isolation,
            shares=config.shares,
            spares=min(config.spares, config.max_sandboxes),
            answer_timeout_s=config.answer_timeout_s,
            preload=["twinkle_isolation._guest.notebook"],
            spare_spec=SandboxSpec(network=config.network, limits=config.limits),
        )
        self._starting = 0
        self._starting_bytes = 0
        self.keys = IdempotencyKeys(self.spawn)
        self._secret = secrets.token_bytes(32)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reaper: asyncio.Task[None] | None = None

    @property
    def isolation(self) -> str:
        """`bubblewrap` or `process`."""
        return self._launcher.info.mode

    async def start(self) -> None:
        """Start the launcher and the clock.

        Raises:
            IsolationUnavailableError: The isolation asked for does not work here.
        """
        await self._launcher.start()
        self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def close(self) -> None:
        """Kill every sandbox."""
        if self._reaper is not None:
            self._reaper.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._launcher.close()
        self.templates.close()

    # Create

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Run something that ends with the server at the latest."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def launch(
        self,
        template: Template,
        *,
        env: dict[str, str],
        network: bool,
        timeout_s: float,
        metadata: dict[str, str],
        secure: bool,
        auto_pause: bool = False,
        auto_resume: bool = False,
        run_start_cmd: bool = True,
    ) -> SandboxRecord:
        """Start a sandbox from a template and hold it; `env` is added to the template's.

        Raises:
            ApiError: No room (429), the template was deleted meanwhile (404), or it did not start
                (500).
        """
        limit = self.config.max_sandboxes
        if len(self.records) + self._starting >= limit:
            self.metrics.refused.inc()
            raise ApiError(
                429, f"{limit} sandboxes exist already, the most this server holds", retry_after_s=1
            )
        sandbox_id = new_id()
        allowed = self._check_total(template)
        self._starting += 1
        self._starting_bytes += allowed
        try:
            sandbox, basis, limits = await self._start(template, network=network)
        except (SandboxStartError, OSError) as error:
            self.metrics.failed.inc()
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                raise ApiError(
                    429, f"the server is out of resources: {error}", retry_after_s=1
                ) from error
            raise ApiError(500, str(error)) from error
        finally:
            self._starting -= 1
            self._starting_bytes -= allowed
        if self._launcher.info.mode == "process":
            network = True  # there is nothing that could take it away
        env = basis.env | env | {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox_id}
        if self._launcher.info.mode == "process":
            metadata = {**metadata, "isolation": "process"}
        token = None
        if secure:
            token = hmac.new(self._secret, sandbox_id.encode(), hashlib.sha256).hexdigest()
        record = SandboxRecord(
            sandbox_id=sandbox_id,
            template_id=template.template_id,
            alias=template.names[0] if template.names else None,
            sandbox=sandbox,
            metadata=metadata,
            env=env,
            default_user=basis.user,
            default_cwd=basis.workdir,
            token=token,
            timeout_s=timeout_s,
            lease_end=time.monotonic() + min(timeout_s, self.config.max_lifetime_s),
            auto_pause=auto_pause,
            auto_resume=auto_resume,
            allow_internet=network,
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
        )
        self.records[sandbox_id] = record
        self.metrics.created.inc()
        self.spawn(self._forget_when_ended(record))
        template.spawn_count += 1
        if basis.start_cmd and run_start_cmd:
            try:
                await self._run_start_cmd(record, basis.start_cmd)
            except (GuestError, SandboxLostError) as error:
                await self.kill(record)
                raise ApiError(500, f"the start command did not start: {error}") from error
        return record

    def _limits_of(self, template: Template) -> Limits:
        limits = self.config.limits
        if template.memory_mb is not None:
            wanted = max(64, template.memory_mb) << 20
            limits = replace(limits, memory_bytes=min(limits.memory_bytes, wanted))
        return limits

    def _check_total(self, template: Template) -> int:
        """Return what a sandbox of this template may use, memory and files, in bytes.

        Raises:
            ApiError: With all others that would be more than the server may give (429).
        """
        limits = self._limits_of(template)
        wanted = limits.memory_bytes + limits.disk_bytes
        used = sum(r.memory_bytes + r.disk_bytes for r in self.records.values())
        total = self.config.total_memory_bytes
        if total is not None and used + self._starting_bytes + wanted > total:
            self.metrics.refused.inc()
            raise ApiError(
                429,
                f"sandboxes may use {total >> 20} MB together, and {wanted >> 20} MB more would "
                "be over that: see --total-memory-mb",
                retry_after_s=1,
            )
        return wanted

    async def _start(
        self, template: Template, *, network: bool
    ) -> tuple[Sandbox, Template, Limits]:
        """Start a sandbox; return it, the template as it was then, and the limits."""
        while True:
            basis = replace(template)
            limits = self._limits_of(basis)
            spec = SandboxSpec(network=network, limits=limits)
            try:
                archive = self.templates.archive_path(basis)
                return await self._launcher.create(spec, archive=archive), basis, limits
            except FileNotFoundError as error:
                if template.archive == basis.archive:
                    text = f"template {template.template_id!r} was deleted meanwhile"
                    raise ApiError(404, text) from error
                # It was built anew meanwhile.

    async def _run_start_cmd(self, record: SandboxRecord, command: str) -> None:
        """Start a template's start command and give it a moment."""
        process = await record.start_shell(command)
        process.detach()

        async def listen() -> None:
            with contextlib.suppress(SandboxLostError):
                await process.wait()

        task = self.spawn(listen())
        await asyncio.wait({task}, timeout=_START_SETTLE_S)

    async def _forget_when_ended(self, record: SandboxRecord) -> None:
        await record.sandbox.wait_ended()
        self._forget(record)

    def _forget(self, record: SandboxRecord) -> None:
        """Drop a sandbox that is lost."""
        if self.records.pop(record.sandbox_id, None) is not None:
            self.metrics.lost.inc()
            logger.warning("sandbox %s ended by itself", record.sandbox_id)

    # Look up

    def get(self, sandbox_id: str, *, status: int = 404) -> SandboxRecord:
        """Return a sandbox. Raises `status`."""
        record = self.records.get(sandbox_id)
        if record is None:
            text = f"the sandbox {sandbox_id!r} was not found: it ended or never was"
            raise ApiError(status, text)
        return record

    async def make_reachable(self, record: SandboxRecord) -> None:
        """Resume a paused sandbox if that was agreed. First see that the request may use it."""
        if record.state == "paused":
            if not record.auto_resume:
                raise ApiError(
                    502,
                    f"a running sandbox {record.sandbox_id!r} was not found: it is paused, "
                    "connect first",
                )
            await self.resume(record, max(record.timeout_s, _RESUMED_TIMEOUT_S))

    # Life

    async def kill(self, record: SandboxRecord) -> None:
        """End a sandbox and wait until nothing of it is left."""
        if self.records.pop(record.sandbox_id, None) is not None:
            self.metrics.killed.inc()
        await record.sandbox.kill()

    async def pause(self, record: SandboxRecord) -> None:
        """Stop the sandbox's processes; its lease becomes the longest allowed. Raises 409, 404."""
        async with record.lock:
            if record.state == "paused":
                raise ApiError(409, f"sandbox {record.sandbox_id!r} is paused already")
            try:
                await record.sandbox.pause()
            except SandboxLostError:
                self._forget(record)
                raise
            record.state = "paused"
            self._lease(record, self.config.max_timeout_s)

    async def resume(self, record: SandboxRecord, timeout_s: float) -> bool:
        """Let the processes go on with a new lease; return whether it was paused. Raises 404."""
        async with record.lock:
            if record.state == "running":
                return False
            try:
                await record.sandbox.resume()
            except SandboxLostError:
                self._forget(record)
                raise
            record.state = "running"
            record.timeout_s = timeout_s
            self._lease(record, timeout_s)
            return True

    def extend(self, record: SandboxRecord, timeout_s: float) -> None:
        """Let the lease end not before `timeout_s` from now; never shorten it."""
        record.timeout_s = max(record.timeout_s, timeout_s)
        if record.lease_end < time.monotonic() + timeout_s:
            self._lease(record, timeout_s)

    def allowed_timeout(self, seconds: float | None, default: float) -> float:
        """Return the lifetime that a request asks for, or the default. Raises 400."""
        longest = self.config.max_timeout_s
        if seconds is not None and seconds > longest:
            raise ApiError(400, f"timeout={seconds:g} is not a number of seconds in 0..{longest:g}")
        return default if seconds is None else seconds

    def set_timeout(self, record: SandboxRecord, timeout_s: float) -> None:
        """Let the lease end `timeout_s` from now."""
        record.timeout_s = timeout_s
        self._lease(record, timeout_s)

    def _lease(self, record: SandboxRecord, timeout_s: float) -> None:
        last = record.begun + self.config.max_lifetime_s
        record.lease_end = min(time.monotonic() + timeout_s, last)

    async def _reap(self) -> None:
        """End the leases that are over."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for record in self.records.values():
                if record.lease_end <= now and not record.ending:
                    record.ending = True
                    self.spawn(self._expire(record))

    async def _expire(self, record: SandboxRecord) -> None:
        """Pause a sandbox whose lease is over, or kill it, whoever else is busy with it."""
        try:
            if record.lease_end > time.monotonic():
                return  # renewed meanwhile
            self.metrics.expired.inc()
            over = time.monotonic() >= record.begun + self.config.max_lifetime_s
            if record.auto_pause and record.state == "running" and not over:
                try:
                    async with asyncio.timeout(self.config.answer_timeout_s):
                        await self.pause(record)
                except (ApiError, SandboxLostError, TimeoutError) as error:
                    if record.lease_end > time.monotonic():
                        return  # paused or renewed by somebody else
                    logger.warning(
                        "sandbox %s is killed, since it could not be paused: %s",
                        record.sandbox_id,
                        error or "it took too long",
                    )
                else:
                    return
            await self.kill(record)
        except Exception:
            logger.exception("sandbox %s could not be ended", record.sandbox_id)
        finally:
            record.ending = False
