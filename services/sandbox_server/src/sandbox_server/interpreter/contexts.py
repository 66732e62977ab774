"""The contexts of one sandbox: each one Python interpreter, its names kept between two runs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sandbox_server.errors import ApiError
from sandbox_server.interpreter.results import Emit, Event, Outputs, error_event
from twinkle_isolation import GuestError
from twinkle_isolation.python import PythonResult, PythonSession

if TYPE_CHECKING:
    from sandbox_server.record import SandboxRecord

_MAX_CONTEXTS = 32
_GRACE_S = 2.0  # from the interrupt to the kill
_LOST = "all names of this context are lost, and the next run starts a new interpreter"


class Run:
    """One piece of code and what it may use.

    Args:
        code: The code.
        env: Environment variables for this run alone.
        timeout_s: Wall time; then it is interrupted, and killed 2 seconds later if it goes on.
        output_bytes: Of everything it prints and shows together.
        emit: Takes the events that say what it does.

    Attributes:
        abandoned: Its client has left.
    """

    def __init__(
        self, code: str, env: Mapping[str, str], *, timeout_s: float, output_bytes: int, emit: Emit
    ) -> None:
        self.code = code
        self.env = env
        self.timeout_s = timeout_s
        self.output_bytes = output_bytes
        self.emit = emit
        self.abandoned = False
        self._python: PythonSession | None = None

    def abandon(self) -> None:
        """Stop it, or never begin it."""
        self.abandoned = True
        if self._python is not None:
            self._python.stop_soon()

    async def work(self, python: PythonSession, outputs: Outputs) -> PythonResult:
        """Run in an interpreter.

        Raises:
            SandboxLostError: The sandbox ended.
        """
        self._python = python
        try:
            return await python.run(
                self.code,
                on_output=outputs.add,
                env=self.env,
                timeout_s=self.timeout_s,
                output_bytes=self.output_bytes,
                grace_s=_GRACE_S,
            )
        finally:
            self._python = None


class Context:
    """One interpreter of a sandbox, started for the first run; one run at a time."""

    def __init__(self, record: SandboxRecord, cwd: str | None) -> None:
        self.context_id = str(uuid.uuid4())
        home = "/root" if record.default_user == "root" else "/home/user"
        self.cwd = cwd or record.default_cwd or home
        self._record = record
        self._python: PythonSession | None = None
        self._count = 0
        self._turn = asyncio.Lock()
        self._removed = False

    async def start(self) -> None:
        """Start the interpreter, if none runs.

        Raises:
            GuestError: It cannot be started: there is no such directory, no room, or the context
                was removed meanwhile.
            SandboxLostError: The sandbox has ended.
        """
        async with self._turn:
            await self._interpreter()

    async def _interpreter(self) -> PythonSession:
        self._check_removed()
        if self._python is None or not self._python.alive:
            record = self._record
            self._count = 0
            self._python = await PythonSession.start(
                record.sandbox,
                env=record.env,
                cwd=self.cwd,
                user=record.default_user,
                notebook=True,
                shared=True,
            )
            self._check_removed()
        return self._python

    def _check_removed(self) -> None:
        if self._removed:
            self.end()  # it may have been removed while its interpreter started
            raise GuestError("not_found", "the context was removed meanwhile")

    def remove(self) -> None:
        """End the interpreter for good; runs that wait for their turn fail."""
        self._removed = True
        self.end()

    def end(self) -> None:
        """Kill the interpreter, and with it the code that runs; the next run starts another."""
        if self._python is not None:
            self._python.kill_soon()
            self._python = None

    async def execute(self, run: Run) -> None:
        """Run code after what runs already, and say by events what it does.

        Raises:
            SandboxLostError: The sandbox ended.
        """
        async with self._turn:
            if run.abandoned:
                return
            try:
                python = await self._interpreter()
            except GuestError as error:
                await run.emit(error_event("InterpreterNotStarted", error.message))
                return
            self._count += 1
            await run.emit({"type": "number_of_executions", "execution_count": self._count})
            if run.abandoned:  # while the interpreter started
                return
            outputs = Outputs(run.emit)
            try:
                result = await run.work(python, outputs)
            except BaseException:
                self.end()  # else the code would go on
                raise
            await outputs.end()
            restarted = self._python is not python
            if result.end is not None and not restarted:
                self._python = None
            error = _judge(run, result, outputs.error, restarted=restarted)
            if error is not None:
                await run.emit(error)


def _judge(run: Run, result: PythonResult, error: Event | None, *, restarted: bool) -> Event | None:
    """Return why the code failed; `None` where it did not."""
    if result.end is not None and restarted:
        return error_event("ContextRestarted", "the context was restarted or removed meanwhile")
    if result.stopped is not None:
        name, what = {
            "output": ("OutputLimitError", f"wrote more than {run.output_bytes} bytes"),
            "asked": ("KeyboardInterrupt", "was left by its client"),
        }.get(result.stopped, ("TimeoutError", f"ran longer than {run.timeout_s:g} s"))
        how = "interrupted; its names are kept" if result.end is None else f"killed: {_LOST}"
        trace = "" if error is None else error["traceback"]
        return error_event(name, f"the code {what} and was {how}", trace)
    if result.end is not None:
        how = f"exit code {result.end.exit_code}"
        if result.end.signal is not None:
            how = f"signal {result.end.signal}"
        if result.end.reason is not None:
            how += f" (its limit of {result.end.reason})"
        return error_event("InterpreterEnded", f"the interpreter ended with {how}: {_LOST}")
    if error is None and result.error is not None:  # its record did not arrive whole
        error = error_event(result.error.type, result.error.message)
    return error


class ContextTable:
    """The contexts of one sandbox; the default one is always among them."""

    def __init__(self) -> None:
        self._by_id: dict[str, Context] = {}
        self._default_id = ""

    def all(self, record: SandboxRecord) -> list[Context]:
        """Return the contexts, oldest first."""
        self.find(record, None)
        return list(self._by_id.values())

    def find(self, record: SandboxRecord, context_id: str | None) -> Context:
        """Return a context; `None` is the default one.

        Raises:
            ApiError: There is none with that id (404).
        """
        if context_id is None:
            if self._default_id not in self._by_id:
                context = Context(record, None)
                self._default_id = context.context_id
                self._by_id[self._default_id] = context
            context_id = self._default_id
        context = self._by_id.get(context_id)
        if context is None:
            raise ApiError(404, f"Context {context_id!r} not found: it was removed or never was")
        return context

    async def create(self, record: SandboxRecord, cwd: str | None) -> Context:
        """Make a context.

        Raises:
            ApiError: There are too many (429).
            GuestError: Its interpreter cannot be started.
            SandboxLostError: The sandbox has ended.
        """
        if len(self._by_id) >= _MAX_CONTEXTS:
            raise ApiError(429, f"more than {_MAX_CONTEXTS} contexts in one sandbox: remove some")
        context = Context(record, cwd)
        self._by_id[context.context_id] = context
        try:
            await context.start()
        except BaseException:
            self.remove(context)
            raise
        return context

    def remove(self, context: Context) -> None:
        """Forget a context and kill its interpreter; a removed default one is made anew."""
        self._by_id.pop(context.context_id, None)
        context.remove()
