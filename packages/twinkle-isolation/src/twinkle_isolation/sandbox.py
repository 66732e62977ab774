"""One running sandbox, as the host sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self

from twinkle_isolation._channel import Call, Channel
from twinkle_isolation._files import FileOperations
from twinkle_isolation.errors import GuestError, IsolationError, SandboxLostError
from twinkle_isolation.process import GuestProcess, kill_request
from twinkle_isolation.types import ExecResult, SandboxSpec, Usage

__all__ = ["Sandbox"]

_DEFAULT_OUTPUT_LIMIT = 16 << 20
_DUMP_TIMEOUT_S = 120.0
_KILL_TIMEOUT_S = 30.0
_WAKE_MARGIN_S = 0.5
_WAKE_INTERVAL_S = 5.0


class Sandbox(FileOperations):
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
        memory_kills: Callable[[], int],
    ) -> None:
        self._channel = channel
        self._pidfd: int | None = pidfd
        self._on_end = on_end
        self._memory_kills = memory_kills
        self._memory_kills_seen = 0
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

        A caller that is cancelled before the program has started does not get it: it is killed.

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
        message = await call.begun(kill_request(call))
        process = self._process(call, message)
        if timeout_s is not None:
            self._wake_after(timeout_s + _WAKE_MARGIN_S, call)
        return process

    def _wake_after(self, delay_s: float, call: Call) -> None:
        """Wake the supervisor once a deadline has passed, until the program has ended.

        It kills the program at the deadline by a timer of its own; this is for the case that
        something in the sandbox has got hold of that timer.
        """

        def wake() -> None:
            if not (call.ended or self.ended):
                self._channel.send({"op": "ping", "id": 0})
                self._wake_after(_WAKE_INTERVAL_S, call)

        asyncio.get_running_loop().call_later(delay_s, wake)

    async def start_python(
        self,
        function: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str = "user",
        report: bool = False,
    ) -> GuestProcess:
        """Start a Python function in an interpreter forked from the warm zygote.

        It costs milliseconds, and is a program like any other: own session, descriptors, limits,
        system call filter. `stdin` is at its end. Descriptor 3 is a control channel, a stream
        socket: `GuestProcess.write_stdin` writes to it, and what the function writes there is the
        stream `control` of `GuestProcess.output`, behind everything it printed before. When the
        program ends, its end is reported within half a second, even where another process holds its
        output open.

        Interpreters of one launcher share the address layout and the hash seed of the zygote.

        Args:
            function: `module:name`, importable in the zygote: the standard library, or a module of
                `twinkle_isolation`. Called without arguments; exit code 0 when it returns.
            env: Added to the sandbox's environment.
            cwd: Its directory; the home of `user` by default.
            user: `user` or `root`.
            report: Give it one more output, descriptor 4: the stream `report`.

        Raises:
            GuestError: `invalid_argument`, `resource_exhausted`.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call(
            "exec",
            args=[function],
            function=function,
            outputs=["report"] if report else [],
            env=dict(env or {}),
            cwd=cwd,
            user=user,
        )
        message = await call.begun(kill_request(call))
        return self._process(call, message)

    def _process(self, call: Call, message: dict[str, Any]) -> GuestProcess:
        pid = call.field(message, "pid", int)
        return GuestProcess(self._channel, call, pid, self._met_memory_limit)

    def _met_memory_limit(self) -> bool:
        """Return whether the kernel has killed for memory since this was asked last."""
        before, self._memory_kills_seen = self._memory_kills_seen, self._memory_kills()
        return self._memory_kills_seen > before

    def kill_programs_soon(self) -> None:
        """Kill every program of the sandbox, however it was started; its files stay."""
        self._channel.send({"op": "kill_all", "id": 0})

    def abandon(self, reason: str) -> None:
        """End the sandbox without waiting for it; what waits for it raises `SandboxLostError`."""
        self._channel.close(reason)
        self._kill_supervisor()

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

    # The whole

    async def pause(self) -> None:
        """Stop every process; file operations still work. Idempotent."""
        await self._channel.call("pause").result()

    async def resume(self) -> None:
        """Let the processes go on. Idempotent."""
        await self._channel.call("resume").result()

    def pause_soon(self) -> None:
        """Do what `pause` does, without waiting for it; requests keep their order."""
        self._channel.send({"op": "pause", "id": 0})

    def resume_soon(self) -> None:
        """Do what `resume` does, without waiting for it."""
        self._channel.send({"op": "resume", "id": 0})

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
            self._channel.send({"id": 0} | kill_request(call))
            raise
        if message.get("reason") == "timeout":
            raise GuestError("deadline_exceeded", f"the files were not read in {timeout_s:g} s")
        if message.get("exit_code") != 0:
            text = trouble.decode(errors="replace") or "their reader was killed"
            raise GuestError("failed_precondition", f"the files could not be read: {text}")


async def _feed(process: GuestProcess, data: bytes) -> None:
    # The program may end, or close its input, before it has read everything.
    with contextlib.suppress(SandboxLostError, GuestError):
        await process.write_all(data)
        await process.close_stdin()
