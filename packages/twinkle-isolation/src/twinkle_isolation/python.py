"""A Python session in a sandbox: code runs piece by piece in one interpreter, its names stay.

The interpreter is a fork of the launcher's warm zygote (`Sandbox.start_python`), so that a session
costs milliseconds. The loop inside is `_guest/repl.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from twinkle_isolation.errors import GuestError, SandboxLostError
from twinkle_isolation.process import GuestProcess, Stream
from twinkle_isolation.sandbox import Sandbox
from twinkle_isolation.types import ProcessEnd

__all__ = ["Output", "PythonError", "PythonResult", "PythonSession", "StopReason"]

StopReason = Literal["timeout", "cpu", "output", "asked"]
Output = Callable[[Stream, bytes], Awaitable[None] | None]

_LOOP = "twinkle_isolation._guest.repl:main"
_NOTEBOOK = "twinkle_isolation._guest.notebook:main"
_LENGTH = struct.Struct("!I")
_MAX_ANSWER_BYTES = 1 << 16
_AT_ONCE_BYTES = 1 << 19  # written without waiting whether it was taken
_KILL_TIMEOUT_S = 10.0
_FIRST_CPU_LOOK_S = 0.2
_CPU_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonError:
    """The exception that ended a piece of code.

    Attributes:
        type: Name of its class.
        kinds: Names of its class and of the classes it derives from, at most 8.
        errno: Of an `OSError`, else `None`.
        message: Its text, at most 200 characters.
        compiling: The code did not compile; nothing of it ran.
    """

    type: str
    kinds: tuple[str, ...] = ()
    errno: int | None = None
    message: str = ""
    compiling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """How a piece of code ended.

    Attributes:
        exit_code: 0 at its end, what `SystemExit` asked for, 130 for `KeyboardInterrupt`, else 1.
            When the interpreter ended: its exit code, or 128 and the signal's number.
        error: The exception, `SystemExit` left out; `None` when the interpreter ended.
        stopped: The limit of `run` because of which it was stopped.
        end: The end of the interpreter; `None` while it lives and has kept its names.
    """

    exit_code: int
    error: PythonError | None = None
    stopped: StopReason | None = None
    end: ProcessEnd | None = None


class PythonSession:
    """One interpreter. Made by `start`; belongs to one event loop; one `run` at a time.

    Unless it is `shared`, the sandbox is the session's alone: between two pieces of code everything
    in it stands still, and at a limit everything in it is killed.

    Example:
        >>> session = await PythonSession.start(sandbox)
        >>> result = await session.run("print(1 + 1)", on_output=lambda stream, data: ...)
    """

    def __init__(self, sandbox: Sandbox, process: GuestProcess, *, shared: bool) -> None:
        self.sandbox = sandbox
        self._process = process
        self._shared = shared
        self._paused = False
        self._received = bytearray()
        self._seed: int | None = None
        self._stopped: StopReason | None = None
        self._stop: Callable[[StopReason], None] | None = None

    @classmethod
    async def start(
        cls,
        sandbox: Sandbox,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str = "user",
        report: bool = False,
        notebook: bool = False,
        shared: bool = False,
    ) -> PythonSession:
        """Start an interpreter.

        Args:
            sandbox: Where; its launcher's `preload` says what is imported already.
            env: Added to the sandbox's environment.
            cwd: Its directory; the home of `user` by default.
            user: `user` or `root`.
            report: Give the code one more output: the stream `report`, whose descriptor is in the
                variable `TWINKLE_REPORT_FD`.
            notebook: Show values, figures and exceptions as a notebook does: as JSON, one object a
                line, on the stream `report`. `{"main": true, "data": {...}}` is the last value of
                the code as a bundle of media types, `{"main": false, ...}` one that it displayed,
                and `{"error": {"name": ..., "value": ..., "traceback": ...}}` the exception that
                ended it. `display` is a built-in function.
            shared: Other programs run in the sandbox.

        Raises:
            GuestError: It cannot be started.
            SandboxLostError: The sandbox has ended.
        """
        variables = dict(env or {})
        if report or notebook:
            variables["TWINKLE_REPORT_FD"] = "4"
        process = await sandbox.start_python(
            _NOTEBOOK if notebook else _LOOP,
            env=variables,
            cwd=cwd,
            user=user,
            report=report or notebook,
        )
        return cls(sandbox, process, shared=shared)

    @property
    def alive(self) -> bool:
        """The interpreter runs, as far as is known."""
        return self._process.end is None and not self.sandbox.ended

    def seed(self, seed: int) -> None:
        """Seed `random`, and numpy's generator where it is preloaded, before the next code."""
        self._seed = seed

    def stop_soon(self) -> None:
        """Stop the code that runs now as at a limit; nothing happens where none runs."""
        if self._stop is not None:
            self._stop("asked")

    def kill_soon(self) -> None:
        """Kill the interpreter and all it started; where `shared` is false, all in the sandbox."""
        if self._shared:
            self._process.kill_all_soon()
        else:
            self.sandbox.kill_programs_soon()

    async def run(
        self,
        code: str,
        *,
        on_output: Output,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        cpu_s: float | None = None,
        output_bytes: int | None = None,
        grace_s: float = 1.0,
        display: bool = True,
        finish: bool = False,
    ) -> PythonResult:
        """Run a piece of code to its end, or until a limit.

        At a limit it gets a `KeyboardInterrupt`, and after `grace_s` seconds more the interpreter
        is killed (`kill_soon`). Cancelling this leaves the code running: kill it then.

        Args:
            code: The code; lone surrogates are a syntax error, as in Python.
            on_output: Called with each piece of output; what threads and child processes wrote
                since the last piece of code is among it. Where it returns an awaitable, the next
                piece waits for that.
            env: Environment variables for this piece of code.
            timeout_s: Wall time.
            cpu_s: Processor time of everything in the sandbox, looked at twice a second.
            output_bytes: Bytes of all outputs together.
            grace_s: Seconds from the interrupt to the kill.
            display: Print the value of a last expression that is not `None`, as the prompt does.
            finish: Then do what Python does at its end: wait for threads, run `atexit`.

        Raises:
            SandboxLostError: The sandbox ended, or did not end the interpreter 10 seconds after
                it was told to.
        """
        self._stopped = None
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        watch: asyncio.Task[None] | None = None
        killed = False

        def stop(reason: StopReason) -> None:
            if self._stopped is not None:
                return
            self._stopped = reason
            self._process.signal_soon(signal.SIGINT, group=False)
            timers.append(loop.call_later(grace_s, kill))

        def kill() -> None:
            nonlocal killed
            killed = True
            self.kill_soon()
            timers.append(
                loop.call_later(
                    _KILL_TIMEOUT_S, self.sandbox.abandon, "it did not end its programs"
                )
            )

        request = {
            "code": code,
            "env": dict(env or {}),
            "display": display,
            "finish": finish,
            "seed": self._seed,
        }
        self._seed = None
        self._stop = stop
        try:
            self._resume()
            if timeout_s is not None:
                timers.append(loop.call_later(timeout_s, stop, "timeout"))
            if cpu_s is not None:
                watch = asyncio.create_task(self._watch_cpu(cpu_s, lambda: stop("cpu")))
            await self._send(request)
            left = output_bytes
            while True:
                piece = await self._process.read()
                if piece is None:
                    return self._result_of_end()
                stream, data = piece
                if stream == "control":
                    answer = self._answer(data)
                    if answer is not None and not killed:  # else the end follows
                        return answer
                    continue
                if left is not None:
                    data, left = data[:left] if left >= 0 else b"", left - len(data)
                    if left < 0:
                        stop("output")
                waiting = on_output(stream, data)
                if waiting is not None:
                    await waiting
        finally:
            self._stop = None
            for timer in timers:
                timer.cancel()
            if watch is not None:
                watch.cancel()
            self._halt()

    async def _send(self, request: Mapping[str, Any]) -> None:
        text = json.dumps(request).encode()
        data = _LENGTH.pack(len(text)) + text
        if len(data) <= _AT_ONCE_BYTES:
            self._process.write_soon(data)
            return
        step = 1 << 19
        try:
            for start in range(0, len(data), step):
                await self._process.write_all(data[start : start + step])
        except GuestError as error:
            if error.code != "not_found":  # it has ended: the next event says how
                raise

    def _answer(self, data: bytes) -> PythonResult | None:
        """Read the loop's answer once it is whole; the code may have written what is none."""
        self._received += data
        if len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size <= _MAX_ANSWER_BYTES and len(self._received) < _LENGTH.size + size:
            return None
        text = self._received[_LENGTH.size : _LENGTH.size + size]
        try:
            if len(self._received) != _LENGTH.size + size:
                raise ValueError("more than one answer")
            return self._result_of(json.loads(text))
        except (ValueError, KeyError, TypeError, RecursionError):
            self.kill_soon()  # then the end follows
            return None
        finally:
            self._received.clear()

    def _result_of(self, answer: Any) -> PythonResult:
        error = answer["error"]
        if error is not None:
            error = PythonError(
                type=str(error["type"])[:200],
                kinds=tuple(str(kind)[:200] for kind in error["kinds"][:8]),
                errno=error["errno"] if isinstance(error["errno"], int) else None,
                message=str(error["message"])[:200],
                compiling=answer["stage"] == "compile",
            )
        return PythonResult(
            exit_code=int(answer["exit_code"]) & 0xFF, error=error, stopped=self._stopped
        )

    def _result_of_end(self) -> PythonResult:
        end = cast("ProcessEnd", self._process.end)
        code = end.exit_code if end.signal is None else 128 + end.signal
        return PythonResult(exit_code=code, stopped=self._stopped, end=end)

    async def _watch_cpu(self, limit_s: float, stop: Callable[[], None]) -> None:
        await asyncio.sleep(_FIRST_CPU_LOOK_S)
        try:
            before = (await self.sandbox.usage()).cpu_s
            while (await self.sandbox.usage()).cpu_s - before < limit_s:  # noqa: ASYNC110
                await asyncio.sleep(_CPU_INTERVAL_S)
        except (GuestError, SandboxLostError):
            return
        stop()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self.sandbox.resume_soon()

    def _halt(self) -> None:
        if not self._shared and self.alive:
            self._paused = True
            self.sandbox.pause_soon()
