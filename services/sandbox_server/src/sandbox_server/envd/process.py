"""The service `process.Process` of envd."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sandbox_server.envd.connect import Answer, Call, Method
from sandbox_server.envd.processes import RunningProcess
from sandbox_server.errors import ApiError
from sandbox_server.models import Environment, Message, Text, Whole
from twinkle_isolation import GuestError, ProcessEnd

_REASONS = {
    "output": "killed: more output than the server allows for one command",
    "disk": "killed: the sandbox's files are over its disk limit",
    "memory": "killed: the sandbox used more memory than it may",
    "processes": "killed: the sandbox had more processes than it may",
}
_SIGNALS: dict[Any, signal.Signals] = {
    name: number
    for number in (signal.SIGTERM, signal.SIGKILL)
    for name in (f"SIGNAL_{number.name}", int(number))
}


def _argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a null character")
    return text


def _decoded(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("must be text in base64")
    return base64.b64decode(value)


def _signal(value: Any) -> signal.Signals:
    if not isinstance(value, (str, int)) or value not in _SIGNALS:
        raise ValueError("is unknown: SIGTERM or SIGKILL")
    return _SIGNALS[value]


Argument = Annotated[Text, AfterValidator(_argument)]
Base64 = Annotated[bytes, BeforeValidator(_decoded)]


class _ProcessConfig(Message):
    cmd: Annotated[Argument, Field(min_length=1)]
    args: list[Argument] = Field(default=[])
    envs: Environment = Field(default={})
    cwd: Text | None = None


class _TerminalSize(Message):
    rows: Annotated[Whole, Field(gt=0, lt=65536)] = 24
    cols: Annotated[Whole, Field(gt=0, lt=65536)] = 80


class _Terminal(Message):
    size: _TerminalSize | None = None


class _StartRequest(Message):
    process: _ProcessConfig
    tag: Text | None = None
    pty: _Terminal | None = None
    stdin: bool = True


class _Selector(Message):
    pid: Whole | None = None
    tag: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pid is None and self.tag is None:
            raise ValueError("must have a `pid` or a `tag`")
        return self


class _ProcessRequest(Message):
    process: _Selector


class _Input(Message):
    stdin: Base64 | None = None
    pty: Base64 | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stdin is None and self.pty is None:
            raise ValueError("must have `stdin` or `pty`")
        return self

    @property
    def data(self) -> bytes:
        return (self.pty if self.stdin is None else self.stdin) or b""


class _InputRequest(_ProcessRequest):
    input: _Input


class _SignalRequest(_ProcessRequest):
    signal: Annotated[Any, AfterValidator(_signal)]


class _UpdateRequest(_ProcessRequest):
    pty: _Terminal = _Terminal()


class _InputData(Message):
    input: _Input


class _StreamInputRequest(Message):
    start: _ProcessRequest | None = None
    data: _InputData | None = None


async def _list_processes(call: Call, message: Message) -> Answer:
    return {
        "processes": [
            {
                "config": running.config,
                "pid": running.process.pid,
                **({} if running.tag is None else {"tag": running.tag}),
            }
            for running in call.record.processes.values()
        ]
    }


async def _start(call: Call, message: _StartRequest) -> AsyncGenerator[Answer, None]:
    # It goes on when the client leaves.
    config = message.process
    size = None
    if message.pty is not None:
        terminal = message.pty.size or _TerminalSize()
        size = (terminal.rows, terminal.cols)
    deadline = call.timeout_s
    if deadline is not None and deadline <= 0:
        raise ApiError(504, "the deadline has passed already")
    process = await call.record.sandbox.start(
        [config.cmd, *config.args],
        env=call.record.env | config.envs,
        cwd=config.cwd or call.record.default_cwd,
        user=call.user,
        stdin=message.stdin,
        pty=size,
        timeout_s=deadline,
        output_limit=call.request.app.config.max_output_bytes,
    )
    running = RunningProcess(process, config.model_dump(exclude_none=True), message.tag)
    events = _events(call, running)  # subscribes before the output is read
    running.start(call.record.processes)
    async with contextlib.aclosing(events):
        async for event in events:
            yield {"event": event}


async def _connect(call: Call, message: _ProcessRequest) -> AsyncGenerator[Answer, None]:
    events = _events(call, _find(call, message.process))
    try:
        async with contextlib.aclosing(events), asyncio.timeout(call.timeout_s):
            async for event in events:
                yield {"event": event}
    except TimeoutError as error:
        raise ApiError(504, "the process still runs, the time to listen is over") from error


def _events(call: Call, running: RunningProcess) -> AsyncGenerator[Answer, None]:
    """Subscribe to a program and yield what it does, and something in every quiet interval."""
    subscription = running.subscribe()

    async def events() -> AsyncGenerator[Answer, None]:
        try:
            yield {"start": {"pid": running.process.pid}}
            while True:
                try:
                    async with asyncio.timeout(call.keepalive_s):
                        item = await subscription.get()
                except TimeoutError:
                    yield {"keepalive": {}}
                    continue
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, ProcessEnd):
                    yield {"end": _end(item)}
                    return
                yield {"data": {item[0]: base64.b64encode(item[1]).decode()}}
        finally:
            running.unsubscribe(subscription)

    return events()


def _find(call: Call, selector: _Selector) -> RunningProcess:
    processes = call.record.processes
    if selector.pid is not None:
        running = processes.get(selector.pid)
    else:
        running = next((r for r in processes.values() if r.tag == selector.tag), None)
    if running is None:
        what = selector.model_dump(exclude_none=True)
        raise ApiError(404, f"process {what} not found: it has ended or never was")
    return running


async def _send_input(call: Call, message: _InputRequest) -> Answer:
    await _find(call, message.process).process.write_stdin(message.input.data)
    return {}


async def _stream_input(call: Call, messages: AsyncIterator[_StreamInputRequest]) -> Answer:
    running: RunningProcess | None = None
    async for message in messages:
        if message.start is not None:
            running = _find(call, message.start.process)
        elif message.data is not None:
            if running is None:
                raise ApiError(400, "the first message of StreamInput must be `start`")
            await running.process.write_stdin(message.data.input.data)
    return {}


async def _close_stdin(call: Call, message: _ProcessRequest) -> Answer:
    await _find(call, message.process).process.close_stdin()
    return {}


async def _send_signal(call: Call, message: _SignalRequest) -> Answer:
    await _find(call, message.process).process.signal(int(message.signal))
    return {}


async def _update(call: Call, message: _UpdateRequest) -> Answer:
    running = _find(call, message.process)
    size = message.pty.size
    if size is not None:
        try:
            await running.process.resize(rows=size.rows, cols=size.cols)
        except GuestError as error:
            raise ApiError(400, error.message) from error
    return {}


def _end(end: ProcessEnd) -> Answer:
    if end.reason == "timeout":
        text = "the command ran longer than its timeout and was killed with its process group"
        raise ApiError(504, text)
    message: Answer = {"exitCode": end.exit_code, "exited": end.signal is None}
    if end.signal is None:
        message["status"] = f"exit status {end.exit_code}"
    else:
        try:
            name = signal.Signals(end.signal).name.removeprefix("SIG").lower()
        except ValueError:
            name = str(end.signal)
        message["status"] = f"signal: {name}"
    if end.reason is not None:
        message["error"] = _REASONS[end.reason]
    elif end.exit_code or end.signal is not None:
        message["error"] = message["status"]
    return message


UNARY: dict[str, Method] = {
    "/process.Process/List": (Message, _list_processes),
    "/process.Process/SendInput": (_InputRequest, _send_input),
    "/process.Process/SendSignal": (_SignalRequest, _send_signal),
    "/process.Process/CloseStdin": (_ProcessRequest, _close_stdin),
    "/process.Process/Update": (_UpdateRequest, _update),
}
STREAMS: dict[str, Method] = {
    "/process.Process/Start": (_StartRequest, _start),
    "/process.Process/Connect": (_ProcessRequest, _connect),
}
CLIENT_STREAMS: dict[str, Method] = {
    "/process.Process/StreamInput": (_StreamInputRequest, _stream_input),
}
