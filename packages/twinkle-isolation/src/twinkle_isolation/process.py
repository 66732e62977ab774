"""A program that runs in a sandbox, and a watch on a directory of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from twinkle_isolation._channel import Call, Channel
from twinkle_isolation._wire import MAX_BODY_BYTES
from twinkle_isolation.errors import GuestError, SandboxLostError
from twinkle_isolation.types import ProcessEnd, WatchEvent

__all__ = ["GuestProcess", "Stream", "Watch", "kill_request"]

Stream = Literal["stdout", "stderr", "pty", "control", "report"]
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr", "pty", "control", "report")
_PART_BYTES = 1 << 16
_FIRST_DELAY_S = 0.005


def kill_request(call: Call) -> dict[str, Any]:
    """Make the request, without its id, that kills the group of the program a call started."""
    return {"op": "signal", "process": call.number, "signal": int(signal.SIGKILL)}


class GuestProcess:
    """A started program.

    Its output waits in the sandbox until it is read, or is dropped after `detach`. One reader at a
    time: `output` yields what comes and returns when the program has ended and everything it wrote
    is read; `end` then says how. Made by `Sandbox.start`; belongs to one event loop.

    Attributes:
        pid: The process id inside the sandbox.
        end: How it ended; `None` while it runs or while its output is not read to the end.
    """

    def __init__(
        self, channel: Channel, call: Call, pid: int, met_memory_limit: Callable[[], bool]
    ) -> None:
        self._channel = channel
        self._call = call
        self._met_memory_limit = met_memory_limit
        self.pid = pid
        self.end: ProcessEnd | None = None

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """Yield pieces of output, at most 64 KiB each, until the end.

        Raises:
            SandboxLostError: The sandbox ended first.
        """
        while (piece := await self.read()) is not None:
            yield piece

    async def read(self) -> tuple[Stream, bytes] | None:
        """Return the next piece of output, at most 64 KiB; `None` after the end.

        Raises:
            SandboxLostError: The sandbox ended first.
        """
        if self.end is not None:
            return None
        message, body = await self._call.next("data", "end")
        if message["ev"] == "data":
            stream = message.get("stream")
            if stream not in _STREAMS:
                raise self._call.broken(f"stream is {stream!r}")
            return stream, body
        number, reason = message.get("signal"), message.get("reason")
        if number == signal.SIGKILL and reason is None and self._met_memory_limit():
            reason = "memory"  # by the cgroup, of which the supervisor knows nothing
        exit_code = self._call.field(message, "exit_code", int)
        self.end = ProcessEnd(exit_code=exit_code, signal=number, reason=reason)
        return None

    async def wait(self) -> ProcessEnd:
        """Drop the output and wait for the end.

        Raises:
            SandboxLostError: The sandbox ended first.
        """
        self.detach()
        async for _ in self.output():
            pass
        assert self.end is not None
        return self.end

    def detach(self) -> None:
        """Drop output that nobody reads; the program goes on and never blocks on it."""
        self._call.detach()

    def attach(self) -> None:
        """Keep the output from now on."""
        self._call.attach()

    def kill_soon(self) -> None:
        """Kill the program's group without waiting for it; nothing happens when it is gone."""
        self.signal_soon(signal.SIGKILL)

    def kill_all_soon(self) -> None:
        """Kill the program's group, and all that came from the program, without waiting for it."""
        self._channel.send({"id": 0, "op": "kill", "process": self._call.number})

    def signal_soon(self, number: int, *, group: bool = True) -> None:
        """Send a signal without waiting for it; nothing happens when the program has ended."""
        request = kill_request(self._call) | {"id": 0, "signal": int(number), "group": group}
        self._channel.send(request)

    def write_soon(self, data: bytes) -> None:
        """Give the program at most 1 MiB of input without waiting whether it was taken."""
        self._channel.send({"id": 0, "op": "stdin", "process": self._call.number}, data)

    async def write_all(self, data: bytes) -> None:
        """Give the program input, and wait while too much of it is not read yet.

        Raises:
            GuestError: As of `write_stdin`, without `resource_exhausted`.
            SandboxLostError: The sandbox has ended.
        """
        for start in range(0, len(data), _PART_BYTES):
            delay = _FIRST_DELAY_S
            while True:
                try:
                    await self.write_stdin(data[start : start + _PART_BYTES])
                except GuestError as error:
                    if error.code != "resource_exhausted":
                        raise
                    await asyncio.sleep(delay)
                    delay = min(0.1, delay * 2)
                else:
                    break

    async def write_stdin(self, data: bytes) -> None:
        """Give the program input (also a terminal's).

        Raises:
            GuestError: `not_found` when it has ended, `failed_precondition` without stdin,
                `resource_exhausted` when 8 MiB wait to be read already.
            SandboxLostError: The sandbox has ended.
        """
        for start in range(0, len(data), MAX_BODY_BYTES):
            part = data[start : start + MAX_BODY_BYTES]
            await self._channel.call("stdin", part, process=self._call.number).result()
            await self._channel.drain()

    async def close_stdin(self) -> None:
        """End the program's input after what was written; a terminal gets end-of-file.

        Raises:
            GuestError: `not_found` when it has ended.
            SandboxLostError: The sandbox has ended.
        """
        await self._channel.call("close_stdin", process=self._call.number).result()

    async def signal(self, number: int, *, group: bool = True) -> None:
        """Send a signal to the program's process group, or (`group=False`) to the program alone.

        Raises:
            GuestError: `not_found` when it has ended.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("signal", process=self._call.number, signal=number, group=group)
        await call.result()

    async def resize(self, *, rows: int, cols: int) -> None:
        """Change the size of the program's terminal.

        Raises:
            GuestError: `failed_precondition` when it has no terminal.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("resize", process=self._call.number, rows=rows, cols=cols)
        await call.result()


class Watch:
    """A watch on a directory: iterate over it, `close` it. Made by `Sandbox.watch`."""

    def __init__(self, channel: Channel, call: Call) -> None:
        self._channel = channel
        self._call = call

    async def events(self) -> AsyncIterator[WatchEvent]:
        """Yield changes until `close`.

        Raises:
            SandboxLostError: The sandbox has ended.
        """
        while True:
            message, _ = await self._call.next("fs", "end")
            if message["ev"] == "end":
                return
            values = {name: message.get(name, "") for name in ("kind", "name", "path")}
            yield self._call.made(WatchEvent, values)

    async def close(self) -> None:
        """Stop watching; does nothing when the sandbox is gone."""
        try:
            await self._channel.call("unwatch", target=self._call.number).result()
        except (GuestError, SandboxLostError):
            return
