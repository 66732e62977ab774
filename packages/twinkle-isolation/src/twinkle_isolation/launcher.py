"""Start the zygote, and make sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from twinkle_isolation import jail
from twinkle_isolation._channel import Channel
from twinkle_isolation._guest.seccomp import filter_for
from twinkle_isolation._order import order_message
from twinkle_isolation._users import SandboxUsers
from twinkle_isolation._zygote_link import CommandFor, ZygoteLink
from twinkle_isolation.cgroups import Cgroups
from twinkle_isolation.errors import (
    IsolationUnavailableError,
    SandboxLostError,
    SandboxStartError,
)
from twinkle_isolation.sandbox import Sandbox
from twinkle_isolation.scratch import discard, make_scratch
from twinkle_isolation.types import IsolationInfo, IsolationMode, SandboxSpec

logger = logging.getLogger(__name__)
__all__ = ["Launcher"]

_ANSWER_TIMEOUT_S = 60.0
_CREATE_TIMEOUT_S = 20.0
_CONCURRENT_STARTS = 8
_UNCOUNTED = ("cpu", "kernel_memory")
_OTHERWISE = (
    "allow user namespaces, or name isolation 'process', which is no boundary: programs see the "
    "host's files and network"
)


class Launcher:
    r"""Makes sandboxes from one warm zygote.

    Open it with `async with` (or `start` and `close`) in the event loop that uses it. Everything
    it started ends when it is closed, and when its process ends for whatever reason, SIGKILL
    included. Not thread-safe, not picklable. The thread that starts it must live as long as it
    does, for the kernel ends the jail with that thread.

    Args:
        isolation: `bubblewrap`, or `process`: a directory, limits and (for root) another user, but
            no boundary. Where `bubblewrap` does not work nothing takes its place by itself.
        shares: Directories of the host that sandboxes see read-only at their own path, as far as
            other users may read them. `DIR/bin` is put in front of `PATH`, and where DIR is a
            virtual environment of this version of Python, `Sandbox.start_python` finds its
            packages. This interpreter's directory is always shared, behind the usual `PATH`.
        data_dir: Where sandboxes keep their files with `process`; a temporary directory by default.
        cgroups: Use control groups where they are writable.
        spares: Sandboxes kept ready, so that `create` only has to hand one out; each costs about 3
            MB.
        spare_spec: What the spares are like. `create` with an equal spec and no archive takes one.
        answer_timeout_s: Seconds the supervisor of a sandbox may be silent while something is asked
            of it; after that the sandbox is killed and what waits raises `SandboxLostError`. Give
            more than the longest single file operation takes.
        preload: Modules that the zygote imports before it forks, for `Sandbox.start_python`: they
            cost time and memory once. Their import runs outside of every sandbox, so name only what
            the server itself would run. OpenBLAS and OpenMP get one thread.
        packages: A directory of Python packages, shared like `shares`, importable for every Python
            program of the sandboxes (`PYTHONPATH`) and for `preload`.

    Raises:
        ValueError: `isolation` is unknown, or `answer_timeout_s` is not above 0.

    Example:
        >>> async with Launcher() as launcher, await launcher.create() as sandbox:
        ...     result = await sandbox.exec(["id", "-un"])
        ...     result.stdout
        b'user\n'
    """

    def __init__(
        self,
        *,
        isolation: IsolationMode = "bubblewrap",
        shares: Sequence[str | os.PathLike[str]] = (),
        data_dir: str | os.PathLike[str] | None = None,
        cgroups: bool = True,
        spares: int = 0,
        spare_spec: SandboxSpec | None = None,
        answer_timeout_s: float = _ANSWER_TIMEOUT_S,
        preload: Sequence[str] = (),
        packages: str | os.PathLike[str] | None = None,
    ) -> None:
        if not answer_timeout_s > 0:
            raise ValueError(f"answer_timeout_s={answer_timeout_s!r} is not above 0")
        if isolation not in ("bubblewrap", "process"):
            raise ValueError(f"isolation={isolation!r} is unknown: use 'bubblewrap' or 'process'")
        self._isolation = isolation
        self._preload = list(preload)
        self._packages = None if packages is None else os.path.abspath(packages)
        self._shares = [os.path.abspath(path) for path in shares]
        if self._packages is not None:
            self._shares.append(self._packages)
        self._data_dir = data_dir
        self._users = SandboxUsers(may_change=os.geteuid() == 0)
        self._use_cgroups = cgroups
        self._answer_timeout_s = answer_timeout_s
        self._spare_count = spares
        self._spare_spec = spare_spec or SandboxSpec()
        self._spares: deque[Sandbox] = deque()
        self._refill: asyncio.Task[None] | None = None
        self._zygote: ZygoteLink | None = None
        self._plan: tuple[CommandFor, dict[str, Any]] | None = None
        self._sandboxes: set[Sandbox] = set()
        self._next = 1  # number of the next directory
        self._scratch: Path | None = None
        self._background: set[asyncio.Task[object]] = set()
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
            NotADirectoryError: One of `shares` is not a directory.
        """
        self._check_shares()
        self._starts = asyncio.Semaphore(_CONCURRENT_STARTS)
        self._reviving = asyncio.Lock()
        self._cgroups = Cgroups() if self._use_cgroups else None
        if self._isolation == "bubblewrap":
            await self._start_jailed()
        else:
            try:
                await self._try_plain()
            except SandboxStartError as error:
                raise IsolationUnavailableError(
                    f"no sandbox can be started here: {error}"
                ) from error
            logger.warning(
                "sandboxes are NOT isolated: isolation 'process' gives a directory and limits only"
            )
        self._keep_spares()

    async def _start_jailed(self) -> None:
        bwrap = jail.find_bwrap()
        if bwrap is None:
            raise IsolationUnavailableError(
                "isolation 'bubblewrap' needs the bwrap program: install the `bubblewrap` extra or "
                f"your system's; {_OTHERWISE}"
            )
        reasons: list[str] = []
        for privileged in (True, False) if os.geteuid() == 0 else (False,):
            try:
                await self._try_jail(bwrap, privileged=privileged)
            except (SandboxStartError, SandboxLostError, OSError) as error:
                reasons.append(str(error))
            else:
                return
        raise IsolationUnavailableError(
            f"isolation 'bubblewrap' does not work here: {'; '.join(reasons)}: {_OTHERWISE}"
        )

    def _check_shares(self) -> None:
        for share in self._shares:
            if not os.path.isdir(share):
                raise NotADirectoryError(f"shares: {share!r} is not a directory of this machine")

    async def create(
        self,
        spec: SandboxSpec | None = None,
        *,
        archive: str | os.PathLike[str] | None = None,
        timeout_s: float = _CREATE_TIMEOUT_S,
    ) -> Sandbox:
        """Make a sandbox.

        A zygote that died (the kernel ran out of memory) is started again first.

        Args:
            spec: What it is like.
            archive: A file with what `Sandbox.snapshot` yielded; its files are there from the
                start.
            timeout_s: How long that may take, without the time to wait for other creates.

        Raises:
            SandboxStartError: It could not be made (in time).
            FileNotFoundError: `archive` is not there.
            OSError: This process is out of descriptors (`EMFILE`) or memory.
        """
        spec = spec or SandboxSpec()
        if self._zygote is None or self._closed:
            raise SandboxStartError("this launcher is not running: use `async with Launcher()`")
        if archive is None and spec == self._spare_spec:
            while self._spares:
                spare = self._spares.popleft()
                if not spare.ended:
                    self._keep_spares()
                    return spare
        return await self._create_in_time(spec, archive, timeout_s)

    async def close(self) -> None:
        """End every sandbox and the zygote. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        self._spares.clear()
        for result in await asyncio.gather(
            *(sandbox.kill() for sandbox in list(self._sandboxes)), return_exceptions=True
        ):
            if isinstance(result, Exception):
                logger.error("closing the launcher: %s", result)
        if self._zygote is not None:
            await self._zygote.close("the launcher was closed")
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._scratch is not None:
            await asyncio.to_thread(discard, self._scratch)

    # Sandboxes

    def _keep_spares(self) -> None:
        """Begin to make what is missing, one by one so that nobody's create waits for it."""
        missing = self._spare_count > len(self._spares)
        if missing and (self._refill is None or self._refill.done()):
            self._refill = asyncio.get_running_loop().create_task(self._make_spares())

    async def _make_spares(self) -> None:
        while len(self._spares) < self._spare_count and not self._closed:
            try:
                spare = await self._create_in_time(self._spare_spec, None, _CREATE_TIMEOUT_S)
            except (SandboxStartError, OSError) as error:
                logger.warning("no spare sandbox can be made: %s", error)
                return  # the next create tries again
            self._spares.append(spare)

    async def _create_in_time(
        self, spec: SandboxSpec, archive: str | os.PathLike[str] | None, timeout_s: float
    ) -> Sandbox:
        async with self._starts:
            try:
                return await asyncio.wait_for(self._create(spec, archive), timeout_s)
            except TimeoutError as error:
                raise SandboxStartError(f"the sandbox did not start in {timeout_s} s") from error

    async def _create(self, spec: SandboxSpec, archive: str | os.PathLike[str] | None) -> Sandbox:
        zygote = await self._living_zygote()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as fds:
            # The archive first: a missing one is the caller's fault, and nothing is made yet.
            archive_fd = None
            if archive is not None:
                archive_fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC)
                fds.callback(os.close, archive_fd)
            uid = self._users.take()
            undo.callback(self._users.give_back, uid)
            directory = self._make_directory(uid) if self.info.mode == "process" else None
            if directory is not None:
                undo.callback(self._in_background, discard, directory)
            lease = self._cgroups.make(spec.limits) if self._cgroups else None
            if lease is not None:
                undo.callback(self._in_background, lease.remove)
                fds.callback(lease.close_fds)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(ours.close)  # the supervisor, if there is one, ends
            fds.callback(theirs.close)
            passed = [theirs.fileno()]
            passed += [archive_fd] if archive_fd is not None else []
            passed += lease.fds if lease is not None else []
            message = order_message(
                spec,
                uid=uid,
                gid=os.getegid() if self._users.is_current_user else uid,
                directory=directory,
                shares=self._shares,
                restored=archive is not None,
                accounted=lease is not None,
            )
            if self._packages is not None:
                message["env"].setdefault("PYTHONPATH", self._packages)
            pid, pidfd = await zygote.fork(message, passed)
            undo.callback(os.close, pidfd)
            channel = await Channel.open(ours, answer_timeout_s=self._answer_timeout_s)
            undo.pop_all()  # the sandbox takes over

        def on_end() -> None:
            self._sandboxes.discard(sandbox)
            self._users.give_back(uid)
            if sandbox in self._spares:
                self._spares.remove(sandbox)
            if lease is not None:
                self._in_background(lease.remove)
            if directory is not None:
                self._in_background(discard, directory)

        memory_kills = lease.memory_kills if lease is not None else lambda: 0
        sandbox = Sandbox(channel, pidfd, pid, spec, on_end, memory_kills)
        self._sandboxes.add(sandbox)
        return sandbox

    def _make_directory(self, uid: int) -> str:
        if self._scratch is None:
            self._scratch = make_scratch("sandboxes", self._data_dir)
            self._scratch.chmod(0o711)
        directory = self._scratch / str(self._next)
        self._next += 1
        directory.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(directory, uid, uid)
        return str(directory)

    def _in_background(self, function: Callable[..., object], *arguments: Any) -> None:
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(function, *arguments))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The zygote

    async def _living_zygote(self) -> ZygoteLink:
        async with self._reviving:
            if self._zygote is None or self._plan is None:
                raise SandboxStartError("this launcher is not running: use `async with Launcher()`")
            if not self._zygote.alive:
                logger.warning("the zygote has ended; starting another one")
                await self._zygote.close("it ended")
                self._zygote = await ZygoteLink.start(*self._plan)
            return self._zygote

    async def _try_jail(self, bwrap: str, *, privileged: bool) -> None:
        """Start the zygote in its jail, and try one sandbox."""
        self._users = SandboxUsers(may_change=privileged)
        prefix = jail.python_prefix()
        shares = [*self._shares, *([prefix] if prefix is not None else [])]

        def command(fd: int) -> list[str]:
            return jail.jail_command(bwrap, fd, shares=shares, privileged=privileged)

        config = {"namespaces": True, "shares": shares, **self._python_config()}
        await self._begin(command, config, mode="bubblewrap")

    def _python_config(self) -> dict[str, Any]:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        shared = [f"{share}/lib/{version}/site-packages" for share in self._shares]
        packages = [self._packages] if self._packages else []
        return {"preload": self._preload, "paths": [*packages, *filter(os.path.isdir, shared)]}

    async def _try_plain(self) -> None:
        self._users = SandboxUsers(may_change=os.geteuid() == 0)
        config: dict[str, Any] = {"namespaces": False, "shares": [], **self._python_config()}
        await self._begin(jail.plain_command, config, mode="process")

    async def _begin(
        self,
        command: CommandFor,
        config: dict[str, Any],
        *,
        mode: IsolationMode,
    ) -> None:
        self._zygote = await ZygoteLink.start(command, config)
        self._plan = (command, config)
        self._info = IsolationInfo(
            mode=mode,
            sandbox_uid=self._users.first,
            cgroup=self._cgroups.version if self._cgroups else "",
            syscall_filter=filter_for(os.uname().machine, accounted=True).active,
            unbounded=("cpu",) if self._cgroups and self._cgroups.version else _UNCOUNTED,
        )
        try:
            async with await self._create_in_time(
                SandboxSpec(), None, _CREATE_TIMEOUT_S
            ) as sandbox:
                await sandbox.exec(["true"])
        except BaseException:
            zygote, self._zygote, self._info = self._zygote, None, None
            await zygote.close("it does not work here")
            raise
        if not self._info.syscall_filter:
            logger.warning(
                "no system call filter: the calls of a %r machine are not known", os.uname().machine
            )
