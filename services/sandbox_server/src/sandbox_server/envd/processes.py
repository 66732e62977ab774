"""The programs of one sandbox, and the subscribers to the output of each."""

from __future__ import annotations

import asyncio
from typing import Any

from sandbox_server.errors import ApiError
from twinkle_isolation import GuestProcess, ProcessEnd, SandboxLostError

__all__ = ["ProcessTable", "RunningProcess"]

_PIECES = 16  # of output, of at most 64 KiB each, that wait for one subscriber

Output = tuple[str, bytes]
Subscription = asyncio.Queue[Output | ProcessEnd | Exception]
"""What one subscriber has yet to read of a program's output; the program waits while it is full."""


class RunningProcess:
    """One program: what it was started with, and the subscribers to its output."""

    def __init__(self, process: GuestProcess, config: dict[str, Any], tag: str | None) -> None:
        self.process = process
        self.config = config
        self.tag = tag
        self._subscriptions: set[Subscription] = set()

    def subscribe(self) -> Subscription:
        """Receive the output from now on."""
        subscription = Subscription(_PIECES)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Receive no more; the program goes on."""
        self._subscriptions.discard(subscription)
        while not subscription.empty():  # the program may wait for room
            subscription.get_nowait()

    async def pump(self) -> None:
        """Move the output to the subscribers until the end; without any it is dropped."""
        try:
            async for piece in self.process.output():
                await self._publish(piece)
            assert self.process.end is not None
            await self._publish(self.process.end)
        except SandboxLostError as error:
            await self._publish(error)

    async def _publish(self, item: Output | ProcessEnd | Exception) -> None:
        for subscription in list(self._subscriptions):
            await subscription.put(item)


class ProcessTable:
    """The programs of one sandbox that have not ended."""

    def __init__(self) -> None:
        self._by_pid: dict[int, RunningProcess] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    def add(self, running: RunningProcess) -> None:
        """Hold a program until it ends."""
        pid = running.process.pid
        self._by_pid[pid] = running

        async def watch() -> None:
            try:
                await running.pump()
            finally:
                if self._by_pid.get(pid) is running:
                    del self._by_pid[pid]

        pump = asyncio.get_running_loop().create_task(watch())
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    def all(self) -> list[RunningProcess]:
        """Return the programs, oldest first."""
        return list(self._by_pid.values())

    def find(self, *, pid: int | None, tag: str | None) -> RunningProcess:
        """Return the program with a `pid`, else with a `tag`.

        Raises:
            ApiError: There is none (any more).
        """
        running = self._by_pid.get(pid) if pid is not None else None
        if pid is None:
            running = next((r for r in self._by_pid.values() if r.tag == tag), None)
        if running is None:
            raise ApiError(404, f"process {pid or tag!r} not found: it has ended or never was")
        return running
