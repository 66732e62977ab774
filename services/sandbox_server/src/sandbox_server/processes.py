"""The programs of one sandbox, and who listens to each."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from sandbox_server.errors import ApiError
from sandbox_server.values import as_text, as_whole
from twinkle_isolation import GuestProcess, ProcessEnd, SandboxLostError

__all__ = ["Output", "ProcessTable", "RunningProcess", "Subscription"]

_BUFFER_BYTES = 1 << 20

Output = tuple[str, bytes]


class Subscription:
    """One listener's share of a program's output. When it is slow, the program waits."""

    def __init__(self) -> None:
        self._items: deque[Output | ProcessEnd | Exception] = deque()
        self._size = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False

    async def put(self, item: Output | ProcessEnd | Exception) -> None:
        """Add one item, as soon as there is room."""
        await self._room.wait()
        if self.closed:
            return
        self._items.append(item)
        if isinstance(item, tuple):
            self._size += len(item[1])
        if self._size > _BUFFER_BYTES:
            self._room.clear()
        self._ready.set()

    async def get(self) -> Output | ProcessEnd:
        """Return the next piece of output, or the end.

        Raises:
            SandboxLostError: The sandbox ended first.
        """
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, tuple):
            self._size -= len(item[1])
            if self._size <= _BUFFER_BYTES // 2:
                self._room.set()
        return item

    def close(self) -> None:
        """Stop listening; the program does not wait for this listener any more."""
        self.closed = True
        self._items.clear()
        self._room.set()


class RunningProcess:
    """One program: what it was started with, and its listeners."""

    def __init__(self, process: GuestProcess, config: dict[str, Any], tag: str | None) -> None:
        self.process = process
        self.config = config
        self.tag = tag
        self.subscriptions: set[Subscription] = set()
        self.task: asyncio.Task[None] | None = None

    def subscribe(self) -> Subscription:
        """Listen from now on."""
        subscription = Subscription()
        self.subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Stop listening; the program goes on."""
        self.subscriptions.discard(subscription)
        subscription.close()

    async def tell(self, item: Output | ProcessEnd | Exception) -> None:
        """Give one item to everybody who listens."""
        for subscription in list(self.subscriptions):
            await subscription.put(item)

    async def pump(self) -> None:
        """Move the output to whoever listens (nobody: it is dropped) until the end."""
        try:
            async for stream, data in self.process.output():
                await self.tell((stream, data))
            assert self.process.end is not None
            await self.tell(self.process.end)
        except SandboxLostError as error:
            await self.tell(error)


class ProcessTable:
    """The programs of one sandbox that have not ended."""

    def __init__(self) -> None:
        self._by_pid: dict[int, RunningProcess] = {}

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

        running.task = asyncio.get_running_loop().create_task(watch())

    def all(self) -> list[RunningProcess]:
        """Return the programs, oldest first."""
        return list(self._by_pid.values())

    def find(self, selector: dict[str, Any]) -> RunningProcess:
        """Return the program with a `pid` or `tag`.

        Raises:
            ApiError: There is none (any more), or the selector names neither (400).
        """
        if "pid" in selector:
            running = self._by_pid.get(as_whole(selector["pid"], "process.pid"))
        elif "tag" in selector:
            tag = as_text(selector["tag"], "process.tag")
            running = next((r for r in self._by_pid.values() if r.tag == tag), None)
        else:
            raise ApiError(400, f"process must have a `pid` or a `tag`: got {selector!r}")
        if running is None:
            raise ApiError(404, f"process {selector!r} not found: it has ended or never was")
        return running
