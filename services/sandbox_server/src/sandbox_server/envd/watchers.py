"""Directory watches that are polled (`CreateWatcher`, `GetWatcherEvents`)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque

from sandbox_server.errors import ApiError
from twinkle_isolation import SandboxLostError, Watch, WatchEvent

__all__ = ["Watcher", "WatcherTable", "events_lost"]

_MAX_EVENTS = 10_000
_MAX_WATCHERS = 64


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
        """Return the events since the last call.

        Raises:
            ApiError: Some were lost. Said once; the next call returns what is there.
        """
        if self.lost:
            self.lost = False
            raise events_lost()
        events = list(self.events)
        self.events.clear()
        return events


def events_lost() -> ApiError:
    """Return the error that says that a watch is not complete."""
    text = "file events were lost: more happened than were fetched, so look at the directory again"
    return ApiError(500, text, code="data_loss")


class WatcherTable:
    """The watches of one sandbox."""

    def __init__(self) -> None:
        self._watchers: dict[str, Watcher] = {}

    def add(self, watch: Watch) -> str:
        """Hold a watch; return its id.

        Raises:
            ApiError: There are too many.
        """
        if len(self._watchers) >= _MAX_WATCHERS:
            raise ApiError(429, f"more than {_MAX_WATCHERS} watchers in one sandbox: remove some")
        watcher_id = secrets.token_hex(8)
        self._watchers[watcher_id] = Watcher(watch)
        return watcher_id

    def find(self, watcher_id: str) -> Watcher:
        """Return a watch.

        Raises:
            ApiError: There is none with that id.
        """
        watcher = self._watchers.get(watcher_id)
        if watcher is None:
            raise ApiError(404, f"watcher {watcher_id!r} not found")
        return watcher

    async def remove(self, watcher_id: str) -> None:
        """Stop a watch.

        Raises:
            ApiError: There is none with that id.
        """
        watcher = self.find(watcher_id)
        del self._watchers[watcher_id]
        await watcher.watch.close()
        watcher.task.cancel()
