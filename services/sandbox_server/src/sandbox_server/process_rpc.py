"""The service `process.Process` of envd."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from sandbox_server.connect import Message, keepalive_s, timeout_s
from sandbox_server.errors import ApiError
from sandbox_server.http import Request
from sandbox_server.processes import RunningProcess, Subscription
from sandbox_server.record import SandboxRecord
from sandbox_server.values import as_environment, as_list, as_object, as_text, as_whole
from twinkle_isolation import GuestError, GuestProcess, ProcessEnd

__all__ = ["ProcessService"]

_REASONS = {
    "output": "killed: more output than the server allows for one command",
    "disk": "killed: the sandbox's files are over its disk limit",
    "memory": "killed: the sandbox used more memory than it may",
    "processes": "killed: the sandbox had more processes than it may",
}


class ProcessService:
    """Serve one request to one sandbox."""

    def __init__(
        self, record: SandboxRecord, request: Request, user: str | None, max_output: int
    ) -> None:
        self.record = record
        self.request = request
        self.user = user or record.default_user
        self.max_output = max_output

    async def list(self, message: Message) -> Message:
        """The running programs."""
        return {
            "processes": [
                {
                    "config": running.config,
                    "pid": running.process.pid,
                    **({} if running.tag is None else {"tag": running.tag}),
                }
                for running in self.record.processes.all()
            ]
        }

    async def start(self, message: Message) -> AsyncGenerator[Message, None]:
        """Start a program and stream what it does. It goes on when the client leaves."""
        config = _config(message.get("process"))
        tag = None if message.get("tag") is None else as_text(message["tag"], "tag")
        size = None
        if "pty" in message:
            size = _terminal_size(as_object(message["pty"], "pty").get("size"))
        deadline = timeout_s(self.request)
        if deadline is not None and deadline <= 0:
            raise ApiError(504, "the deadline has passed already", code="deadline_exceeded")
        process = await self.record.sandbox.start(
            [config["cmd"], *config["args"]],
            env=self.record.env | config["envs"],
            cwd=config.get("cwd") or self.record.default_cwd,
            user=self.user,
            stdin=bool(message.get("stdin", True)),
            pty=size,
            timeout_s=deadline,
            output_limit=self.max_output,
        )
        running = RunningProcess(process, config, tag)
        subscription = running.subscribe()
        self.record.processes.add(running)
        async for event in self._events(running, subscription, process):
            yield {"event": event}

    async def connect(self, message: Message) -> AsyncGenerator[Message, None]:
        """Stream what a running program does from now on."""
        running = self._find(message)
        subscription = running.subscribe()
        events = self._events(running, subscription, running.process)
        deadline = timeout_s(self.request)
        try:
            async with contextlib.aclosing(events), asyncio.timeout(deadline):
                async for event in events:
                    yield {"event": event}
        except TimeoutError as error:
            text = "the process still runs, the time to listen is over"
            raise ApiError(504, text, code="deadline_exceeded") from error

    async def _events(
        self, running: RunningProcess, subscription: Subscription, process: GuestProcess
    ) -> AsyncGenerator[Message, None]:
        keepalive = keepalive_s(self.request)
        try:
            yield {"start": {"pid": process.pid}}
            while True:
                try:
                    async with asyncio.timeout(keepalive):
                        item = await subscription.get()
                except TimeoutError:
                    yield {"keepalive": {}}
                    continue
                if isinstance(item, ProcessEnd):
                    yield {"end": _end(item)}
                    return
                yield {"data": {item[0]: base64.b64encode(item[1]).decode()}}
        finally:
            running.unsubscribe(subscription)

    def _find(self, message: Message) -> RunningProcess:
        return self.record.processes.find(as_object(message.get("process"), "process"))

    async def send_input(self, message: Message) -> Message:
        """Give a program input."""
        running = self._find(message)
        await running.process.write_stdin(_input(message))
        return {}

    async def stream_input(self, messages: AsyncIterator[Message]) -> Message:
        """Give a program input, piece by piece."""
        running: RunningProcess | None = None
        async for message in messages:
            if "start" in message:
                running = self._find(as_object(message["start"], "start"))
            elif "data" in message:
                if running is None:
                    raise ApiError(400, "the first message of StreamInput must be `start`")
                data = _input(as_object(message["data"], "data"))
                await running.process.write_stdin(data)
        return {}

    async def close_stdin(self, message: Message) -> Message:
        """End a program's input."""
        running = self._find(message)
        await running.process.close_stdin()
        return {}

    async def send_signal(self, message: Message) -> Message:
        """Send SIGTERM or SIGKILL to a program's process group."""
        numbers = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: 15, 9: 9}
        wanted = message.get("signal", "")
        number = numbers.get(wanted) if isinstance(wanted, (str, int)) else None
        if number is None:
            raise ApiError(400, f"signal {message.get('signal')!r} is unknown: SIGTERM or SIGKILL")
        running = self._find(message)
        await running.process.signal(int(number))
        return {}

    async def update(self, message: Message) -> Message:
        """Change the size of a program's terminal."""
        running = self._find(message)
        size = as_object(message.get("pty"), "pty").get("size")
        if size is not None:
            rows, cols = _terminal_size(size)
            try:
                await running.process.resize(rows=rows, cols=cols)
            except GuestError as error:
                raise ApiError(400, error.message) from error
        return {}


def _terminal_size(value: object) -> tuple[int, int]:
    size = as_object(value, "size")
    rows = as_whole(size.get("rows", 24), "size.rows")
    cols = as_whole(size.get("cols", 80), "size.cols")
    if not (0 < rows < 65536 and 0 < cols < 65536):
        raise ApiError(400, f"size {rows} x {cols} is not that of a terminal")
    return rows, cols


def _config(value: object) -> dict[str, Any]:
    message = as_object(value, "process")
    command = as_text(message.get("cmd"), "process.cmd")
    args = [as_text(arg, "process.args") for arg in as_list(message.get("args"), "process.args")]
    if not command or any("\0" in arg for arg in [command, *args]):
        raise ApiError(400, "process.cmd must not be empty, and nothing may hold a null character")
    envs = as_environment(message.get("envs"), "process.envs")
    config: dict[str, Any] = {"cmd": command, "args": args, "envs": envs}
    if message.get("cwd"):
        config["cwd"] = as_text(message["cwd"], "process.cwd")
    return config


def _input(message: Message) -> bytes:
    value = as_object(message.get("input"), "input")
    text = as_text(value.get("stdin", value.get("pty")), "input.stdin or input.pty")
    try:
        return base64.b64decode(text)
    except binascii.Error as error:
        raise ApiError(400, f"input is not base64: {error}") from error


def _end(end: ProcessEnd) -> Message:
    if end.reason == "timeout":
        text = "the command ran longer than its timeout and was killed with its process group"
        raise ApiError(504, text, code="deadline_exceeded")
    message: Message = {"exitCode": end.exit_code, "exited": end.signal is None}
    if end.signal is None:
        message["status"] = f"exit status {end.exit_code}"
        if end.exit_code:
            message["error"] = message["status"]
    else:
        try:
            name = signal.Signals(end.signal).name.removeprefix("SIG").lower()
        except ValueError:
            name = str(end.signal)
        message["status"] = f"signal: {name}"
        message["error"] = message["status"]
    if end.reason is not None:
        message["error"] = _REASONS[end.reason]
    return message
