"""One running sandbox, as the host sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Mapping,
    Sequence,
)
from typing import Any, Self, cast

from twinkle_isolation._channel import Call, Channel
from twinkle_isolation._wire import MAX_BODY_BYTES
from twinkle_isolation.errors import GuestError, IsolationError, SandboxLostError
from twinkle_isolation.process import GuestProcess, Watch
from twinkle_isolation.types import DirEntry, ExecResult, SandboxSpec, Usage

__all__ = ["Sandbox"]

_DEFAULT_READ_LIMIT = 256 << 20
_DEFAULT_OUTPUT_LIMIT = 16 << 20
_DUMP_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 30.0


class Sandbox:
    r"""A running sandbox.

    Made by `Launcher.create`; belongs to the event loop that made it; not picklable. Paths are
    those of the sandbox: absolute, or relative to the home of `user` (`/home/user`, or `/root`).
    Every method raises `SandboxLostError` once the sandbox has ended, and `GuestError` when the
    sandbox says no.

    Example:
        >>> async with await launcher.create() as sandbox:
        ...     await sandbox.write_file("hello.py", b"print(1 + 1)")
        ...     result = await sandbox.exec(["python3", "hello.py"], timeout_s=10)
        ...     result.stdout
        b'2\n'

    Attributes:
        spec: What it was made from.
        pid: Its first process, as the zygote sees it.
    """

    def __init__(
        self,
        channel: Channel,
        pidfd: int,
        pid: int,
        spec: SandboxSpec,
        on_end: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._pidfd: int | None = pidfd
        self._on_end = on_end
        self._exited = asyncio.Event()
        self.spec = spec
        self.pid = pid
        channel.on_lost = self._kill_supervisor
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    @property
    def ended(self) -> bool:
        """True once the sandbox has ended, for whatever reason."""
        return self._channel.closed or self._pidfd is None

    async def wait_ended(self) -> None:
        """Wait until no process of the sandbox is left."""
        await self._exited.wait()

    async def kill(self) -> None:
        """End the sandbox, and wait until its supervisor is gone. Idempotent.

        With `bubblewrap` its other processes and its files are gone with it. With `process` they
        are killed and removed right after, and `Launcher.close` waits for that.

        Raises:
            IsolationError: It did not end in 30 seconds, although the kernel was told to end it.
        """
        self._channel.close("it was killed")
        self._kill_supervisor()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self._exited.wait()
        except TimeoutError as error:
            raise IsolationError(
                f"the sandbox with process {self.pid} did not end in {_KILL_TIMEOUT_S:g} s"
            ) from error

    def _kill_supervisor(self) -> None:
        if self._pidfd is not None:
            # Not permitted: then the closed connection ends the supervisor.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _begun(self, call: Call, undo: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the start of what goes on then; who does not wait for it gets nothing."""
        try:
            message, _ = await call.next("start")
        except asyncio.CancelledError:
            call.detach()
            self._channel.send({**undo, "id": 0})
            raise
        return message

    def _on_exit(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._channel.close("its supervisor is gone")
        self._exited.set()
        self._on_end()

    # Programs

    async def start(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str = "user",
        stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout_s: float | None = None,
        output_limit: int | None = None,
    ) -> GuestProcess:
        """Start a program.

        Args:
            args: The program (looked up in `PATH`) and its arguments.
            env: Added to the sandbox's environment.
            cwd: Its directory; the home of `user` by default.
            user: `user`, or `root` (user id 0 inside; no more rights than `user`).
            stdin: Give it an input to write to; else it reads end-of-file.
            pty: Rows and columns of a terminal that takes the place of its three streams.
            timeout_s: After this long its process group is killed. `None`: never.
            output_limit: After this many bytes of output its process group is killed. `None`:
                never.

        A caller that is cancelled before the program has started does not get it: it is killed.

        Raises:
            GuestError: `not_found` (no such program), `invalid_argument` (`cwd`, `user`),
                `resource_exhausted`.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call(
            "exec",
            args=list(args),
            env=dict(env or {}),
            cwd=cwd,
            user=user,
            stdin=stdin,
            pty=None if pty is None else {"rows": pty[0], "cols": pty[1]},
            timeout_s=timeout_s,
            output_limit=output_limit,
        )
        undo = {"op": "signal", "process": call.number, "signal": int(signal.SIGKILL)}
        message = await self._begun(call, undo)
        return GuestProcess(self._channel, call, call.field(message, "pid", int))

    async def exec(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str = "user",
        stdin: bytes | None = None,
        timeout_s: float | None = 60.0,
        output_limit: int = _DEFAULT_OUTPUT_LIMIT,
    ) -> ExecResult:
        """Run a program to its end and return what it wrote.

        A program that meets a limit is killed, and what it wrote until then is returned: see
        `ExecResult.end.reason`.

        Args:
            args: The program and its arguments.
            env: Added to the sandbox's environment.
            cwd: Its directory.
            user: `user` or `root`.
            stdin: Its whole input.
            timeout_s: Wall time.
            output_limit: Bytes of stdout and stderr together.

        Raises:
            GuestError: It could not be started.
            SandboxLostError: The sandbox ended first.
        """
        process = await self.start(
            args,
            env=env,
            cwd=cwd,
            user=user,
            stdin=stdin is not None,
            timeout_s=timeout_s,
            output_limit=output_limit,
        )
        feeder = None if stdin is None else asyncio.create_task(_feed(process, stdin))
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        try:
            async for stream, data in process.output():
                parts.setdefault(stream, []).append(data)
        except asyncio.CancelledError:
            process.detach()
            process.kill_soon()
            raise
        finally:
            if feeder is not None:
                feeder.cancel()
        assert process.end is not None
        return ExecResult(
            end=process.end, stdout=b"".join(parts["stdout"]), stderr=b"".join(parts["stderr"])
        )

    # Files

    async def open_read(
        self, path: str, *, user: str = "user", limit_bytes: int = _DEFAULT_READ_LIMIT
    ) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Open a regular file; return its size now and its content in pieces.

        Close the pieces (`contextlib.aclosing`) when not all are wanted.

        Raises:
            GuestError: `not_found`, `invalid_argument` (a directory or device),
                `permission_denied`; while reading: `resource_exhausted` past `limit_bytes`.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("read", path=path, user=user, limit=limit_bytes)
        message = await self._begun(call, {"op": "cancel", "target": call.number})

        async def pieces() -> AsyncGenerator[bytes, None]:
            done = False
            try:
                while True:
                    event, body = await call.next("data", "result")
                    if event["ev"] == "result":
                        done = True
                        return
                    yield body
            finally:
                if not done:
                    self._channel.forget(call.number)
                    self._channel.send({"op": "cancel", "id": 0, "target": call.number})

        return call.field(message, "size", int), pieces()

    async def read_file(
        self, path: str, *, user: str = "user", limit_bytes: int = _DEFAULT_READ_LIMIT
    ) -> bytes:
        """Return the content of a regular file.

        Raises:
            GuestError: As `open_read`.
            SandboxLostError: The sandbox has ended.
        """
        _, pieces = await self.open_read(path, user=user, limit_bytes=limit_bytes)
        return b"".join([piece async for piece in pieces])

    async def write_file(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        user: str = "user",
        mode: int | None = None,
    ) -> DirEntry:
        """Write a regular file (its parents are made, its old content is replaced) and describe it.

        Raises:
            GuestError: `no_space`, `invalid_argument` (a directory or device),
                `permission_denied`. What was written before the failure stays.
            SandboxLostError: The sandbox has ended.
        """
        source = _pieces(data) if isinstance(data, bytes) else _resize(data)
        call = None
        try:
            async for piece in source:
                if call is None:
                    call = self._channel.call(
                        "write", piece, path=path, user=user, mode=mode, more=True
                    )
                else:
                    self._channel.send({"op": "chunk", "id": call.number, "more": True}, piece)
                await self._channel.drain()
        finally:
            if call is not None:
                self._channel.send({"op": "chunk", "id": call.number, "more": False})
        if call is None:
            call = self._channel.call("write", path=path, user=user, mode=mode, more=False)
        await call.result()
        return await self.stat(path, user=user)

    async def stat(self, path: str, *, user: str = "user") -> DirEntry:
        """Describe a path; links are not followed.

        Raises:
            GuestError: `not_found`.
            SandboxLostError: The sandbox has ended.
        """
        return await self._entry(self._channel.call("stat", path=path, user=user))

    async def list_dir(self, path: str, *, user: str = "user", depth: int = 1) -> list[DirEntry]:
        """List a directory, `depth` levels deep, in the order of names.

        Raises:
            GuestError: `not_found`, `invalid_argument` (not a directory).
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("list", path=path, user=user, depth=depth)
        entries: list[dict[str, Any]] = []
        while True:
            message, _ = await call.next("part", "result")
            if message["ev"] == "result":
                value = cast("dict[str, Any]", call.field(message, "value", dict))
                entries += call.field(value, "entries", list)
                return [call.made(DirEntry, entry) for entry in entries]
            entries += call.field(message, "entries", list)

    async def make_dir(self, path: str, *, user: str = "user") -> DirEntry:
        """Make a directory and its parents.

        Raises:
            GuestError: `already_exists`, `invalid_argument` (there is a file),
                `permission_denied`, `no_space`.
            SandboxLostError: The sandbox has ended.
        """
        return await self._entry(self._channel.call("mkdir", path=path, user=user))

    async def move(self, source: str, destination: str, *, user: str = "user") -> DirEntry:
        """Rename a path.

        Raises:
            GuestError: `not_found`, `permission_denied`, `invalid_argument` (to another file
                system).
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("move", path=source, destination=destination, user=user)
        return await self._entry(call)

    async def _entry(self, call: Call) -> DirEntry:
        return call.made(DirEntry, await call.result())

    async def remove(self, path: str, *, user: str = "user") -> None:
        """Remove a path with all below it; one that is not there is removed already.

        Raises:
            GuestError: `permission_denied`.
            SandboxLostError: The sandbox has ended.
        """
        await self._channel.call("remove", path=path, user=user).result()

    async def watch(self, path: str, *, user: str = "user", recursive: bool = False) -> Watch:
        """Watch a directory for changes.

        Raises:
            GuestError: `not_found`, `invalid_argument` (not a directory), `resource_exhausted`.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("watch", path=path, user=user, recursive=recursive)
        await self._begun(call, {"op": "unwatch", "target": call.number})
        return Watch(self._channel, call)

    # The whole

    async def pause(self) -> None:
        """Stop every process; file operations still work. Idempotent."""
        await self._channel.call("pause").result()

    async def resume(self) -> None:
        """Let the processes go on. Idempotent."""
        await self._channel.call("resume").result()

    async def usage(self) -> Usage:
        """Return what the sandbox uses now."""
        call = self._channel.call("usage")
        return call.made(Usage, await call.result())

    async def snapshot(self, *, timeout_s: float = _DUMP_TIMEOUT_S) -> AsyncGenerator[bytes, None]:
        """Yield a tar stream of every writable file (no memory, no processes).

        Close it (`contextlib.aclosing`) when not all is wanted.

        Pause the sandbox first, or files may change while they are read.
        `Launcher.create(archive=...)` makes a sandbox from it.

        Raises:
            SandboxLostError: The sandbox ended.
            GuestError: `deadline_exceeded` after `timeout_s` seconds, paused or not;
                `failed_precondition` when something could not be read. The sandbox goes on.
        """
        call = self._channel.call("dump", timeout_s=timeout_s)
        trouble = b""
        try:
            while True:
                message, body = await call.next("data", "end")
                if message["ev"] == "end":
                    break
                if message.get("stream") == "archive":
                    yield body
                else:
                    trouble += body
        except (GeneratorExit, asyncio.CancelledError):
            call.detach()
            self._channel.send({"op": "signal", "id": 0, "process": call.number, "signal": 9})
            raise
        if message.get("reason") == "timeout":
            raise GuestError("deadline_exceeded", f"the files were not read in {timeout_s:g} s")
        if message.get("exit_code") != 0:
            text = trouble.decode(errors="replace") or "their reader was killed"
            raise GuestError("failed_precondition", f"the files could not be read: {text}")


async def _feed(process: GuestProcess, data: bytes) -> None:
    # The program may end, or close its input, before it has read everything.
    with contextlib.suppress(SandboxLostError):
        step = 1 << 16
        for start in range(0, len(data), step):
            delay = 0.005
            while True:
                try:
                    await process.write_stdin(data[start : start + step])
                except GuestError as error:
                    if error.code != "resource_exhausted":
                        return
                    await asyncio.sleep(delay)
                    delay = min(0.1, delay * 2)
                else:
                    break
        with contextlib.suppress(GuestError):
            await process.close_stdin()


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), MAX_BODY_BYTES):
        yield data[start : start + MAX_BODY_BYTES]


async def _resize(source: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for data in source:
        for start in range(0, len(data), MAX_BODY_BYTES):
            yield data[start : start + MAX_BODY_BYTES]
