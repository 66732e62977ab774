"""The service `filesystem.Filesystem` of envd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta

from sandbox_server.connect import Message, keepalive_s, timeout_s
from sandbox_server.errors import ApiError
from sandbox_server.http import Request
from sandbox_server.record import SandboxRecord
from sandbox_server.values import as_text, as_whole
from sandbox_server.watchers import events_lost
from twinkle_isolation import DirEntry, WatchEvent

__all__ = ["FilesystemService", "locate"]

_ENTRIES_PER_TURN = 500
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_NS = -62_135_596_800 * 10**9
_LAST_NS = 253_402_300_799 * 10**9  # no fraction, which a client might round up
_TYPES = {
    "file": "FILE_TYPE_FILE",
    "dir": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
    "other": "FILE_TYPE_UNSPECIFIED",
}


def locate(record: SandboxRecord, path: object) -> str:
    """Return a request's path as the sandbox takes it.

    Relative ones start at the template's directory.

    Raises:
        ApiError: It is not text.
    """
    if not isinstance(path, str):
        raise ApiError(400, f"path must be text: got {path!r}")
    if record.default_cwd is not None and not path.startswith(("/", "~")):
        return f"{record.default_cwd}/{path}" if path else record.default_cwd
    return path


class FilesystemService:
    """Serve one request to one sandbox."""

    def __init__(self, record: SandboxRecord, request: Request, user: str | None) -> None:
        self.record = record
        self.sandbox = record.sandbox
        self.request = request
        self.user = user or record.default_user

    def _path(self, message: Message, key: str = "path") -> str:
        return locate(self.record, message.get(key, ""))

    async def stat(self, message: Message) -> Message:
        """Describe a path."""
        return {"entry": _entry(await self.sandbox.stat(self._path(message), user=self.user))}

    async def make_dir(self, message: Message) -> Message:
        """Make a directory."""
        return {"entry": _entry(await self.sandbox.make_dir(self._path(message), user=self.user))}

    async def move(self, message: Message) -> Message:
        """Rename a path."""
        source, destination = self._path(message, "source"), self._path(message, "destination")
        return {"entry": _entry(await self.sandbox.move(source, destination, user=self.user))}

    async def list_dir(self, message: Message) -> Message:
        """List a directory."""
        depth = as_whole(message.get("depth") or 1, "depth")
        entries = await self.sandbox.list_dir(self._path(message), user=self.user, depth=depth)
        described: list[Message] = []
        for entry in entries:
            described.append(_entry(entry))
            if len(described) % _ENTRIES_PER_TURN == 0:
                await asyncio.sleep(0)  # other requests' turn
        return {"entries": described}

    async def remove(self, message: Message) -> Message:
        """Remove a path."""
        await self.sandbox.remove(self._path(message), user=self.user)
        return {}

    async def create_watcher(self, message: Message) -> Message:
        """Begin to collect changes."""
        recursive = bool(message.get("recursive"))
        watch = await self.sandbox.watch(self._path(message), user=self.user, recursive=recursive)
        try:
            return {"watcherId": self.record.watchers.add(watch)}
        except ApiError:
            await watch.close()
            raise

    async def get_watcher_events(self, message: Message) -> Message:
        """Return the changes since the last call."""
        watcher = self.record.watchers.find(as_text(message.get("watcherId", ""), "watcherId"))
        events = watcher.take()
        return {"events": [_event(event) for event in events]}

    async def remove_watcher(self, message: Message) -> Message:
        """Stop collecting changes."""
        await self.record.watchers.remove(as_text(message.get("watcherId", ""), "watcherId"))
        return {}

    async def watch_dir(self, message: Message) -> AsyncGenerator[Message, None]:
        """Stream changes."""
        recursive = bool(message.get("recursive"))
        deadline = timeout_s(self.request)
        keepalive = keepalive_s(self.request)
        watch = await self.sandbox.watch(self._path(message), user=self.user, recursive=recursive)
        events = watch.events()
        upcoming: asyncio.Task[WatchEvent] | None = None
        try:
            yield {"start": {}}
            async with asyncio.timeout(deadline):
                while True:
                    upcoming = upcoming or asyncio.create_task(_following(events))
                    done, _ = await asyncio.wait({upcoming}, timeout=keepalive)
                    if not done:
                        yield {"keepalive": {}}
                        continue
                    event, upcoming = upcoming.result(), None
                    if event.kind == "overflow":
                        raise events_lost()
                    yield {"filesystem": _event(event)}
        except _WatchEndedError:
            return
        except TimeoutError as error:
            raise ApiError(504, "the time to watch is over", code="deadline_exceeded") from error
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await watch.close()


class _WatchEndedError(Exception):
    pass


async def _following(events: AsyncIterator[WatchEvent]) -> WatchEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:  # which no task may raise
        raise _WatchEndedError from None


def _event(event: WatchEvent) -> Message:
    return {"name": _text(event.name), "type": f"EVENT_TYPE_{event.kind.upper()}"}


def _text(name: str) -> str:
    """Return a name as JSON can carry it: bytes that are no UTF-8 become U+FFFD."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _timestamp(time_ns: int) -> str:
    """Return a time as google.protobuf.Timestamp has it in JSON: the years 1 to 9999, no others."""
    seconds, nanos = divmod(min(max(time_ns, _FIRST_NS), _LAST_NS), 10**9)
    moment = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
    return f"{moment}.{nanos:09d}Z"


def _entry(entry: DirEntry) -> Message:
    message: Message = {
        "name": _text(entry.name),
        "type": _TYPES[entry.type],
        "path": _text(entry.path),
        "size": str(entry.size),
        "mode": entry.mode,
        "permissions": entry.permissions,
        "owner": entry.owner,
        "group": entry.group,
        "modifiedTime": _timestamp(entry.modified_ns),
    }
    if entry.target is not None:
        message["symlinkTarget"] = _text(entry.target)
    return message
