"""Directory watches that are polled (`CreateWatcher`, `GetWatcherEvents`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from sandbox_server.errors import ApiError
from twinkle_isolation import SandboxLostError, Watch, WatchEvent

_MAX_EVENTS = 10_000


class Watcher:
    """One watch and the events that were not fetched yet, at most 10,000."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.events: deque[WatchEvent] = deque()
        self.lost = False
        self.task = asyncio.get_running_loop().create_task(self._collect())

    async def _collect(self) -> None:
        with contextlib.suppress(SandboxLostError):
            async for event in self.watch.events():
                if event.kind == "overflow" or len(self.events) >= _MAX_EVENTS:
                    self.lost = True
                else:
                    self.events.append(event)

    def take(self) -> list[WatchEvent]:
        """Return the events since the last call."""
        if self.lost:
            self.lost = False
            raise events_lost()
        events = list(self.events)
        self.events.clear()
        return events

    async def close(self) -> None:
        """Stop the watch."""
        await self.watch.close()
        self.task.cancel()


def events_lost() -> ApiError:
    """Return the error that says that a watch is not complete."""
    text = "file events were lost: more happened than were fetched, so look at the directory again"
    return ApiError(500, text, code="data_loss")
