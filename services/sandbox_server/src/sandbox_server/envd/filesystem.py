"""The service `filesystem.Filesystem` of envd."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta

from sandbox_server.envd.connect import Answer, Call, Method
from sandbox_server.envd.watchers import Watcher, events_lost
from sandbox_server.errors import ApiError
from sandbox_server.models import Message, Text, Whole
from sandbox_server.record import SandboxRecord
from twinkle_isolation import DirEntry, WatchEvent

_ENTRIES_PER_TURN = 500
_MAX_WATCHERS = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_NS = -62_135_596_800 * 10**9
_LAST_NS = 253_402_300_799 * 10**9  # no fraction, which a client might round up
_TYPES = {
    "file": "FILE_TYPE_FILE",
    "dir": "FILE_TYPE_DIRECTORY",
    "symlink": "FILE_TYPE_SYMLINK",
    "other": "FILE_TYPE_UNSPECIFIED",
}


class _PathRequest(Message):
    path: Text = ""


class _MoveRequest(Message):
    source: Text = ""
    destination: Text = ""


class _ListDirRequest(_PathRequest):
    depth: Whole = 1


class _WatchRequest(_PathRequest):
    recursive: bool = False


class _WatcherRequest(Message):
    watcher_id: Text = ""


def locate(record: SandboxRecord, path: str) -> str:
    """Return a request's path as the sandbox takes it: relative ones in its own directory."""
    if record.default_cwd is not None and not path.startswith(("/", "~")):
        return f"{record.default_cwd}/{path}" if path else record.default_cwd
    return path


async def _stat(call: Call, message: _PathRequest) -> Answer:
    path = locate(call.record, message.path)
    return {"entry": _entry(await call.record.sandbox.stat(path, user=call.user))}


async def _make_dir(call: Call, message: _PathRequest) -> Answer:
    path = locate(call.record, message.path)
    return {"entry": _entry(await call.record.sandbox.make_dir(path, user=call.user))}


async def _move(call: Call, message: _MoveRequest) -> Answer:
    source, target = (locate(call.record, path) for path in (message.source, message.destination))
    return {"entry": _entry(await call.record.sandbox.move(source, target, user=call.user))}


async def _list_dir(call: Call, message: _ListDirRequest) -> Answer:
    path = locate(call.record, message.path)
    depth = message.depth or 1
    described: list[Answer] = []
    for entry in await call.record.sandbox.list_dir(path, user=call.user, depth=depth):
        described.append(_entry(entry))
        if len(described) % _ENTRIES_PER_TURN == 0:
            await asyncio.sleep(0)  # other requests' turn
    return {"entries": described}


async def _remove(call: Call, message: _PathRequest) -> Answer:
    await call.record.sandbox.remove(locate(call.record, message.path), user=call.user)
    return {}


async def _create_watcher(call: Call, message: _WatchRequest) -> Answer:
    path = locate(call.record, message.path)
    watch = await call.record.sandbox.watch(path, user=call.user, recursive=message.recursive)
    watchers = call.record.watchers
    if len(watchers) >= _MAX_WATCHERS:
        await watch.close()
        raise ApiError(429, f"more than {_MAX_WATCHERS} watchers in one sandbox: remove some")
    watcher_id = secrets.token_hex(8)
    watchers[watcher_id] = Watcher(watch)
    return {"watcherId": watcher_id}


async def _get_watcher_events(call: Call, message: _WatcherRequest) -> Answer:
    events = _watcher(call, message.watcher_id).take()
    return {"events": [_event(event) for event in events]}


async def _remove_watcher(call: Call, message: _WatcherRequest) -> Answer:
    watcher = _watcher(call, message.watcher_id)
    del call.record.watchers[message.watcher_id]
    await watcher.close()
    return {}


def _watcher(call: Call, watcher_id: str) -> Watcher:
    watcher = call.record.watchers.get(watcher_id)
    if watcher is None:
        raise ApiError(404, f"watcher {watcher_id!r} not found")
    return watcher


async def _watch_dir(call: Call, message: _WatchRequest) -> AsyncGenerator[Answer, None]:
    deadline, keepalive = call.timeout_s, call.keepalive_s
    path = locate(call.record, message.path)
    watch = await call.record.sandbox.watch(path, user=call.user, recursive=message.recursive)
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
        raise ApiError(504, "the time to watch is over") from error
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


def _event(event: WatchEvent) -> Answer:
    return {"name": _text(event.name), "type": f"EVENT_TYPE_{event.kind.upper()}"}


def _text(name: str) -> str:
    """Return a name as JSON can carry it: bytes that are no UTF-8 become U+FFFD."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _timestamp(time_ns: int) -> str:
    """Return a time as google.protobuf.Timestamp has it in JSON: the years 1 to 9999, no others."""
    seconds, nanos = divmod(min(max(time_ns, _FIRST_NS), _LAST_NS), 10**9)
    moment = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
    return f"{moment}.{nanos:09d}Z"


def _entry(entry: DirEntry) -> Answer:
    message: Answer = {
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


UNARY: dict[str, Method] = {
    "/filesystem.Filesystem/Stat": (_PathRequest, _stat),
    "/filesystem.Filesystem/MakeDir": (_PathRequest, _make_dir),
    "/filesystem.Filesystem/Move": (_MoveRequest, _move),
    "/filesystem.Filesystem/ListDir": (_ListDirRequest, _list_dir),
    "/filesystem.Filesystem/Remove": (_PathRequest, _remove),
    "/filesystem.Filesystem/CreateWatcher": (_WatchRequest, _create_watcher),
    "/filesystem.Filesystem/GetWatcherEvents": (_WatcherRequest, _get_watcher_events),
    "/filesystem.Filesystem/RemoveWatcher": (_WatcherRequest, _remove_watcher),
}
STREAMS: dict[str, Method] = {"/filesystem.Filesystem/WatchDir": (_WatchRequest, _watch_dir)}
