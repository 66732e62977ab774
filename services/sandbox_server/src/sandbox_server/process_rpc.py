"""The service `process.Process` of envd."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

from sandbox_server.connect import Message, timeout_s
from sandbox_server.errors import ApiError
from sandbox_server.http import Request
from sandbox_server.processes import RunningProcess, Subscription
from sandbox_server.record import SandboxRecord
from twinkle_isolation import GuestError, GuestProcess, ProcessEnd

__all__ = ["ProcessService"]

_DEFAULT_KEEPALIVE_S = 90.0
_REASONS = {
    "output": "killed: more output than the server allows for one command",
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

    async def start(self, message: Message) -> AsyncIterator[Message]:
        """Start a program and stream what it does. It goes on when the client leaves."""
        config = _config(message.get("process"))
        size = (message.get("pty") or {}).get("size") if "pty" in message else None
        deadline = timeout_s(self.request)
        if deadline is not None and deadline <= 0:
            raise ApiError(504, "the deadline has passed already", code="deadline_exceeded")
        process = await self.record.sandbox.start(
            [config["cmd"], *config["args"]],
            env=self.record.env | config["envs"],
            cwd=config.get("cwd") or self.record.default_cwd,
            user=self.user,
            stdin=bool(message.get("stdin", True)),
            pty=None if size is None else (int(size.get("rows", 24)), int(size.get("cols", 80))),
            timeout_s=deadline,
            output_limit=self.max_output,
        )
        running = RunningProcess(process, config, message.get("tag"))
        running.is_pty = size is not None
        subscription = running.subscribe()
        self.record.processes.add(running)
        async for event in self._events(running, subscription, process):
            yield {"event": event}

    async def connect(self, message: Message) -> AsyncIterator[Message]:
        """Stream what a running program does from now on."""
        running = self.record.processes.find(message.get("process") or {})
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
    ) -> AsyncIterator[Message]:
        interval = self.request.headers.get("keepalive-ping-interval", "")
        keepalive = (
            float(interval) if interval.isdigit() and int(interval) > 0 else _DEFAULT_KEEPALIVE_S
        )
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

    async def send_input(self, message: Message) -> Message:
        """Give a program input."""
        running = self.record.processes.find(message.get("process") or {})
        await running.process.write_stdin(_input(message.get("input") or {}))
        return {}

    async def stream_input(self, messages: AsyncIterator[Message]) -> Message:
        """Give a program input, piece by piece."""
        running: RunningProcess | None = None
        async for message in messages:
            if "start" in message:
                running = self.record.processes.find(message["start"].get("process") or {})
            elif "data" in message:
                if running is None:
                    raise ApiError(400, "the first message of StreamInput must be `start`")
                data = _input(message["data"].get("input") or {})
                await running.process.write_stdin(data)
        return {}

    async def close_stdin(self, message: Message) -> Message:
        """End a program's input."""
        running = self.record.processes.find(message.get("process") or {})
        await running.process.close_stdin()
        return {}

    async def send_signal(self, message: Message) -> Message:
        """Send SIGTERM or SIGKILL to a program's process group."""
        numbers = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL, 15: 15, 9: 9}
        number = numbers.get(message.get("signal", ""))
        if number is None:
            raise ApiError(400, f"signal {message.get('signal')!r} is unknown: SIGTERM or SIGKILL")
        running = self.record.processes.find(message.get("process") or {})
        await running.process.signal(int(number))
        return {}

    async def update(self, message: Message) -> Message:
        """Change the size of a program's terminal."""
        running = self.record.processes.find(message.get("process") or {})
        size = (message.get("pty") or {}).get("size")
        if size is not None:
            try:
                await running.process.resize(rows=int(size["rows"]), cols=int(size["cols"]))
            except GuestError as error:
                raise ApiError(400, error.message) from error
        return {}


def _config(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("cmd"), str) or not value["cmd"]:
        raise ApiError(400, f"process needs a `cmd`: got {value!r}")
    args, envs = value.get("args", []), value.get("envs", {})
    if not all(isinstance(arg, str) and "\0" not in arg for arg in [value["cmd"], *args]):
        raise ApiError(400, "the program and its arguments must be text without null characters")
    for name, content in envs.items():
        if (
            not name
            or "=" in name
            or "\0" in name
            or not isinstance(content, str)
            or "\0" in content
        ):
            raise ApiError(400, f"environment variable {name!r} is not possible")
    config: dict[str, Any] = {"cmd": value["cmd"], "args": args, "envs": envs}
    if value.get("cwd"):
        config["cwd"] = value["cwd"]
    return config


def _input(value: Message) -> bytes:
    text = value.get("stdin", value.get("pty"))
    if not isinstance(text, str):
        raise ApiError(400, "input needs `stdin` or `pty`")
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
