"""The programs of one sandbox, and the subscribers to the output of each."""

from __future__ import annotations

import asyncio
from typing import Any

from twinkle_isolation import GuestProcess, ProcessEnd, SandboxLostError

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
        self._pump: asyncio.Task[None] | None = None

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

    def start(self, table: dict[int, RunningProcess]) -> None:
        """Stay in `table` until the program ends, and move its output to the subscribers.

        Without any subscriber the output is dropped.
        """
        table[self.process.pid] = self
        self._pump = asyncio.get_running_loop().create_task(self._move_output(table))

    async def _move_output(self, table: dict[int, RunningProcess]) -> None:
        try:
            async for piece in self.process.output():
                await self._publish(piece)
            assert self.process.end is not None
            await self._publish(self.process.end)
        except SandboxLostError as error:
            await self._publish(error)
        finally:
            if table.get(self.process.pid) is self:
                del table[self.process.pid]

    async def _publish(self, item: Output | ProcessEnd | Exception) -> None:
        for subscription in list(self._subscriptions):
            await subscription.put(item)
