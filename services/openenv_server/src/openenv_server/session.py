"""Coding sessions: each one CPython in one sandbox, forked from a warm interpreter."""

from __future__ import annotations

import asyncio
import codecs
import logging
import signal
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from openenv_server.limits import Failure, SessionLimits
from openenv_server.output import BoundedText
from openenv_server.packages import stage_packages
from twinkle_isolation import (
    IsolationError,
    IsolationUnavailableError,
    Launcher,
    Sandbox,
    SandboxLostError,
)
from twinkle_isolation.python import PythonResult, PythonSession
from twinkle_isolation.scratch import discard, make_scratch

logger = logging.getLogger(__name__)
__all__ = ["CodeResult", "CodeSession", "Sessions"]

_MAX_REPORT_BYTES = 1 << 20
_STDLIB = (
    *("abc", "argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "cmath"),
    *("collections", "concurrent.futures", "contextlib", "copy", "csv", "ctypes", "dataclasses"),
    *("datetime", "decimal", "difflib", "enum", "fractions", "functools", "glob", "hashlib"),
    *("heapq", "html", "inspect", "io", "itertools", "json", "logging", "math", "multiprocessing"),
    *("numbers", "operator", "os", "pathlib", "pickle", "platform", "pprint", "queue", "random"),
    *("re", "resource", "secrets", "selectors", "shlex", "shutil", "signal", "socket", "sqlite3"),
    *("statistics", "string", "struct", "subprocess", "sys", "tempfile", "textwrap", "threading"),
    *("time", "timeit", "traceback", "types", "typing", "unicodedata", "unittest", "unittest.mock"),
    *("urllib.parse", "uuid", "warnings", "weakref", "zlib", "zoneinfo"),
)
_ALWAYS = ("twinkle_isolation._guest.repl",)
_ERRNO = {
    11: Failure.PROCESSES,
    23: Failure.OPEN_FILES,
    24: Failure.OPEN_FILES,
    27: Failure.DISK,
    28: Failure.DISK,
    122: Failure.DISK,
}

State = Literal["kept", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeResult:
    """What one piece of code did.

    Attributes:
        stdout: What it printed, also when it failed afterwards.
        stderr: What it and Python wrote there, and in square brackets what the server has to say.
        exit_code: 0 when it ran to its end; else what `SystemExit` asked for, or 1; of an
            interpreter that ended its exit code, or 128 and the number of the signal.
        failure: Why it failed; `None` exactly when `exit_code` is 0.
        state: `lost`: the names of earlier steps are gone, because this step or the one before it
            ended the interpreter.
        report: What a fresh run wrote to its report descriptor; `None` of a step.
        report_truncated: There was more of it than 1 MiB.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0
    failure: Failure | None = None
    state: State = "kept"
    report: str | None = None
    report_truncated: bool = False


class _Collected:
    """The output of one step, bounded."""

    def __init__(self, limits: SessionLimits) -> None:
        self._texts = {name: BoundedText(limits.max_output_chars) for name in ("stdout", "stderr")}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: decoder("replace") for name in self._texts}
        self._report = bytearray()
        self._report_truncated = False

    def add(self, stream: str, data: bytes) -> None:
        if stream in self._texts:
            self._texts[stream].add(self._decoders[stream].decode(data))
        elif stream == "report":
            room = _MAX_REPORT_BYTES - len(self._report)
            self._report += data[:room]
            self._report_truncated |= len(data) > room

    def result(
        self,
        *,
        exit_code: int,
        failure: Failure | None,
        state: State,
        notes: list[str],
        fresh: bool,
    ) -> CodeResult:
        for name, decoder in self._decoders.items():
            self._texts[name].add(decoder.decode(b"", final=True))
        stderr = self._texts["stderr"].text()
        if notes:
            line = "".join(f"[{note}]\n" for note in notes)
            stderr = f"{stderr}\n{line}" if stderr and stderr[-1] != "\n" else stderr + line
        return CodeResult(
            stdout=self._texts["stdout"].text(),
            stderr=stderr,
            exit_code=exit_code,
            failure=failure,
            state=state,
            report=self._report.decode("utf-8", "replace") if fresh else None,
            report_truncated=self._report_truncated,
        )


class CodeSession:
    """One session: a sandbox, and an interpreter in it that is replaced when it ends.

    Made by `Sessions.create`; belongs to its event loop; one `run` at a time.
    """

    def __init__(self, sessions: Sessions, sandbox: Sandbox, python: PythonSession) -> None:
        self._sessions = sessions
        self._limits = sessions.limits
        self._sandbox = sandbox
        self._python = python
        self._lost = ""  # why the names are gone, until the next step has said so
        self._closed = False

    def seed(self, seed: int) -> None:
        """Seed `random` (and numpy's generator where it is preloaded) before the next step."""
        self._python.seed(seed)

    async def run(self, code: str) -> CodeResult:
        """Run a step; what the code does wrong is a result.

        A caller that is cancelled ends the session.

        Raises:
            IsolationError: There is no interpreter to be had; that is no fault of the code.
        """
        if len(code) > self._limits.max_code_chars:
            return _too_long(code, self._limits)
        notes: list[str] = []
        state: State = "kept"
        try:
            if self._lost:
                await self._restart()
                notes.append(f"{self._lost}; this step ran in a new interpreter")
                state, self._lost = "lost", ""
            collected = _Collected(self._limits)
            timeout_s = self._limits.step_timeout_s
            ended = await _run(self._python, code, collected, self._limits, timeout_s)
            exit_code, failure, note = _classify_end(ended, self._limits, timeout_s)
        except asyncio.CancelledError:
            self.abandon()
            raise
        notes += [note] if note else []
        if ended is None or ended.end is not None:
            state = "lost"
            files = "and files " if self._sandbox.ended else ""
            notes.append(f"the interpreter has ended: all names {files}are lost")
            self._lost = f"the step before ended the interpreter: earlier names {files}are lost"
        return collected.result(
            exit_code=exit_code, failure=failure, state=state, notes=notes, fresh=False
        )

    async def _restart(self) -> None:
        """Start another interpreter, in the same sandbox where that still lives."""
        if not self._sandbox.ended:
            try:
                self._sandbox.kill_programs_soon()
                self._python = await PythonSession.start(self._sandbox)
            except IsolationError as error:
                logger.info("no new interpreter in a sandbox, taking another one: %s", error)
            else:
                return
        self._sandbox.abandon("its interpreter could not be started again")
        self._sandbox, self._python = await self._sessions.take()
        self._lost = self._lost.replace("names are", "names and files are")

    def abandon(self) -> None:
        """End the session without waiting for it."""
        self._closed = True
        self._sandbox.abandon("its session was closed")

    async def close(self) -> None:
        """End the session with everything in it. Idempotent."""
        self._closed = True
        await self._sandbox.kill()


class Sessions:
    """Makes sessions: one launcher, and a few interpreters kept ready.

    Open it with `async with` (or `start` and `close`) in the event loop that uses it.

    Raises:
        IsolationUnavailableError: In `start`: sessions cannot be isolated here as the limits ask.
        MissingPackageError: In `start`: one of `limits.packages` is not installed.
    """

    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.limits = limits or SessionLimits()
        self._spec = self.limits.sandbox()
        self._launcher: Launcher | None = None
        self._starting = asyncio.Lock()
        self._ready: deque[tuple[Sandbox, PythonSession]] = deque()
        self._refill: asyncio.Task[None] | None = None
        self._packages: Path | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start what makes sessions. Idempotent."""
        async with self._starting:
            if self._launcher is not None:
                return
            if self.limits.packages:
                self._packages = make_scratch("packages")
                self._packages.chmod(0o755)
                await asyncio.to_thread(stage_packages, self.limits.packages, self._packages)
            launcher = Launcher(
                isolation=self.limits.isolation,
                packages=self._packages,
                preload=[*_ALWAYS, *_STDLIB, *self.limits.preload],
            )
            try:
                await launcher.start()
            except IsolationUnavailableError as error:
                if self.limits.isolation == "process" or "cannot preload" in str(error):
                    raise
                raise IsolationUnavailableError(
                    f"{error}. Allow user namespaces to this process (in a container: a seccomp "
                    "profile that allows unshare and mount), or use --isolation process, where the "
                    "code of sessions has this server's network and can read its files"
                ) from error
            if launcher.info.mode == "process":
                logger.warning(
                    "sessions are NOT isolated (--isolation process): their code has this server's "
                    "network, can read what this server's machine lets it, and can reach the other "
                    "sessions"
                )
            self._launcher = launcher
            self._keep_ready()

    async def create(self, *, seed: int | None = None) -> CodeSession:
        """Make a session.

        Raises:
            IsolationError: It could not be made.
        """
        session = CodeSession(self, *await self.take())
        if seed is not None:
            session.seed(seed)
        return session

    async def take(self) -> tuple[Sandbox, PythonSession]:
        """Take a ready interpreter, or make one.

        Raises:
            IsolationError: It could not be made.
        """
        await self.start()
        while self._ready:
            sandbox, python = self._ready.popleft()
            if not sandbox.ended:
                self._keep_ready()
                return sandbox, python
        made = await self._make()
        self._keep_ready()
        return made

    async def run_fresh(self, code: str, *, timeout_s: float | None = None) -> CodeResult:
        """Run a program in an interpreter and a sandbox of its own.

        What it writes to the descriptor whose number is in `TWINKLE_REPORT_FD` is the `report`.
        A run that something outside may have killed is run once more: what kills itself does so
        again.

        Args:
            code: The program. Like Python, it ends after its threads and exit handlers.
            timeout_s: Wall time, at most `limits.step_timeout_s`, which is the default.

        Raises:
            IsolationError: There is no interpreter to be had, or its sandbox ended under it; that
                is no fault of the code.
        """
        if len(code) > self.limits.max_code_chars:
            return _too_long(code, self.limits)
        longest = self.limits.step_timeout_s
        limit_s = longest if timeout_s is None else min(timeout_s, longest)
        await self.start()
        result, killed = await self._run_once(code, limit_s)
        if killed:
            logger.warning("a fresh run was killed: it is run once more")
            result, _ = await self._run_once(code, limit_s)
        if result is None:
            raise SandboxLostError("the sandbox of a fresh run ended under it, twice")
        return result

    async def _run_once(self, code: str, limit_s: float) -> tuple[CodeResult | None, bool]:
        """Return what came of it, `None` where its sandbox ended; and whether it was killed."""
        assert self._launcher is not None
        sandbox = await self._launcher.create(self._spec)
        try:
            python = await PythonSession.start(sandbox, report=True)
            collected = _Collected(self.limits)
            ended = await _run(python, code, collected, self.limits, limit_s, fresh=True)
            if ended is None:
                return None, True
            exit_code, failure, note = _classify_end(ended, self.limits, limit_s)
            notes = [note] if note else []
            result = collected.result(
                exit_code=exit_code, failure=failure, state="kept", notes=notes, fresh=True
            )
            by_signal = ended.end is not None and ended.end.signal == signal.SIGKILL
            return result, by_signal and failure is Failure.CRASH
        finally:
            sandbox.abandon("its run has ended")

    async def close(self) -> None:
        """End every session. Idempotent."""
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        self._ready.clear()
        if self._launcher is not None:
            await self._launcher.close()
        if self._packages is not None:
            await asyncio.to_thread(discard, self._packages)

    async def _make(self) -> tuple[Sandbox, PythonSession]:
        assert self._launcher is not None
        sandbox = await self._launcher.create(self._spec)
        try:
            return sandbox, await PythonSession.start(sandbox)
        except BaseException:
            sandbox.abandon("no interpreter could be started in it")
            raise

    def _keep_ready(self) -> None:
        missing = len(self._ready) < self.limits.spares
        if missing and (self._refill is None or self._refill.done()):
            self._refill = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        while len(self._ready) < self.limits.spares:
            try:
                self._ready.append(await self._make())
            except (IsolationError, OSError) as error:
                logger.warning("no spare session can be made: %s", error)
                return  # the next session tries again


async def _run(
    python: PythonSession,
    code: str,
    collected: _Collected,
    limits: SessionLimits,
    timeout_s: float,
    *,
    fresh: bool = False,
) -> PythonResult | None:
    """Run code; `None` when its sandbox ended."""
    try:
        return await python.run(
            code,
            on_output=collected.add,
            timeout_s=timeout_s,
            cpu_s=limits.step_cpu_s,
            output_bytes=limits.max_output_mb << 20,
            grace_s=limits.interrupt_grace_s,
            display=not fresh,
            finish=fresh,
        )
    except SandboxLostError as error:
        logger.warning("a sandbox ended under its session: %s", error)
        return None


def _classify_end(
    ended: PythonResult | None, limits: SessionLimits, timeout_s: float
) -> tuple[int, Failure | None, str]:
    """Return exit code, failure, and what is to be said of it."""
    if ended is None:
        return 1, Failure.CRASH, "crash: the sandbox of the session has ended"
    failure: Failure | None = None
    said = ""
    if ended.stopped is not None:
        failure = Failure(ended.stopped)
    elif ended.end is not None:
        failure = Failure(ended.end.reason) if ended.end.reason else Failure.CRASH
        if ended.end.signal == signal.SIGXCPU:
            failure = Failure.CPU
        how = f"code {ended.end.exit_code}"
        if ended.end.signal is not None:
            how = f"signal {ended.end.signal}"
        said = f"the interpreter ended with {how} in the middle of the step"
    elif ended.error is not None:
        failure = _failure_of(ended)
    elif ended.exit_code:
        failure = Failure.EXCEPTION
    if failure is None:
        return 0, None, ""
    code = 1 if ended.stopped is not None else ended.exit_code or 1
    limit = limits.explain(failure, timeout_s=timeout_s)
    note = f"{failure}: {limit or said}" if limit or said else ""
    return code, failure, note


def _failure_of(ended: PythonResult) -> Failure:
    error = ended.error
    assert error is not None
    if error.compiling:
        return Failure.SYNTAX
    if "MemoryError" in error.kinds:
        return Failure.MEMORY
    if error.type == "RuntimeError" and error.message == "can't start new thread":
        return Failure.PROCESSES
    if "OSError" in error.kinds and error.errno in _ERRNO:
        return _ERRNO[error.errno]
    return Failure.EXCEPTION


def _too_long(code: str, limits: SessionLimits) -> CodeResult:
    text = (
        f"[too_long: the code has {len(code):,} characters, and CODE_MAX_CODE_CHARS allows "
        f"{limits.max_code_chars:,}]\n"
    )
    return CodeResult(stderr=text, exit_code=1, failure=Failure.TOO_LONG)
