"""The operations on the files of a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from typing import Any, cast

from twinkle_isolation._channel import Call, Channel
from twinkle_isolation._wire import MAX_BODY_BYTES
from twinkle_isolation.process import Watch
from twinkle_isolation.types import DirEntry

__all__ = ["FileOperations"]

_DEFAULT_READ_LIMIT = 256 << 20


class FileOperations:
    """What a `Sandbox` does with files."""

    _channel: Channel

    async def open_read(
        self, path: str, *, user: str = "user", limit_bytes: int = _DEFAULT_READ_LIMIT
    ) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Open a regular file; return its size now and its content in pieces.

        Close the pieces (`contextlib.aclosing`) when not all are wanted.

        Raises:
            GuestError: `not_found`, `invalid_argument` (a directory or device),
                `permission_denied`; while reading: `resource_exhausted` past `limit_bytes`.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("read", path=path, user=user, limit=limit_bytes)
        message = await call.begun({"op": "cancel", "target": call.number})

        async def pieces() -> AsyncGenerator[bytes, None]:
            done = False
            try:
                while True:
                    event, body = await call.next("data", "result")
                    if event["ev"] == "result":
                        done = True
                        return
                    yield body
            finally:
                if not done:
                    self._channel.forget(call.number)
                    self._channel.send({"op": "cancel", "id": 0, "target": call.number})

        return call.field(message, "size", int), pieces()

    async def read_file(
        self, path: str, *, user: str = "user", limit_bytes: int = _DEFAULT_READ_LIMIT
    ) -> bytes:
        """Return the content of a regular file.

        Raises:
            GuestError: As `open_read`.
            SandboxLostError: The sandbox has ended.
        """
        _, pieces = await self.open_read(path, user=user, limit_bytes=limit_bytes)
        return b"".join([piece async for piece in pieces])

    async def write_file(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        user: str = "user",
        mode: int | None = None,
    ) -> DirEntry:
        """Write a regular file (its parents are made, its old content is replaced) and describe it.

        Raises:
            GuestError: `no_space`, `invalid_argument` (a directory or device),
                `permission_denied`. What was written before the failure stays.
            SandboxLostError: The sandbox has ended.
        """
        source = _frames(data)
        call = None
        try:
            async for piece in source:
                if call is None:
                    call = self._channel.call(
                        "write", piece, path=path, user=user, mode=mode, more=True
                    )
                else:
                    self._channel.send({"op": "chunk", "id": call.number, "more": True}, piece)
                await self._channel.drain()
        finally:
            if call is not None:
                self._channel.send({"op": "chunk", "id": call.number, "more": False})
        if call is None:
            call = self._channel.call("write", path=path, user=user, mode=mode, more=False)
        await call.result()
        return await self.stat(path, user=user)

    async def stat(self, path: str, *, user: str = "user") -> DirEntry:
        """Describe a path; links are not followed.

        Raises:
            GuestError: `not_found`.
            SandboxLostError: The sandbox has ended.
        """
        return await self._entry(self._channel.call("stat", path=path, user=user))

    async def list_dir(self, path: str, *, user: str = "user", depth: int = 1) -> list[DirEntry]:
        """List a directory, `depth` levels deep, in the order of names.

        Raises:
            GuestError: `not_found`, `invalid_argument` (not a directory, more than 50,000
                entries or 8 MiB of names).
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("list", path=path, user=user, depth=depth)
        entries: list[DirEntry] = []
        while True:
            message, _ = await call.next("part", "result")
            final = message["ev"] == "result"
            part = cast("dict[str, Any]", call.field(message, "value", dict)) if final else message
            found = cast("list[object]", call.field(part, "entries", list))
            entries += [call.made(DirEntry, entry) for entry in found]
            if final:
                return entries
            await asyncio.sleep(0)  # other sandboxes' turn: parts may come as fast as they are read

    async def make_dir(self, path: str, *, user: str = "user") -> DirEntry:
        """Make a directory and its parents.

        Raises:
            GuestError: `already_exists`, `invalid_argument` (there is a file),
                `permission_denied`, `no_space`.
            SandboxLostError: The sandbox has ended.
        """
        return await self._entry(self._channel.call("mkdir", path=path, user=user))

    async def move(self, source: str, destination: str, *, user: str = "user") -> DirEntry:
        """Rename a path.

        Raises:
            GuestError: `not_found`, `permission_denied`, `invalid_argument` (to another file
                system).
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("move", path=source, destination=destination, user=user)
        return await self._entry(call)

    async def _entry(self, call: Call) -> DirEntry:
        return call.made(DirEntry, await call.result())

    async def remove(self, path: str, *, user: str = "user") -> None:
        """Remove a path with all below it; one that is not there is removed already.

        Raises:
            GuestError: `permission_denied`.
            SandboxLostError: The sandbox has ended.
        """
        await self._channel.call("remove", path=path, user=user).result()

    async def watch(self, path: str, *, user: str = "user", recursive: bool = False) -> Watch:
        """Watch a directory for changes.

        Raises:
            GuestError: `not_found`, `invalid_argument` (not a directory), `resource_exhausted`.
            SandboxLostError: The sandbox has ended.
        """
        call = self._channel.call("watch", path=path, user=user, recursive=recursive)
        await call.begun({"op": "unwatch", "target": call.number})
        return Watch(self._channel, call)


async def _frames(data: bytes | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield content in pieces that fit into a frame."""
    if isinstance(data, bytes):
        for piece in _cut(data):
            yield piece
        return
    async for part in data:
        for piece in _cut(part):
            yield piece


def _cut(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), MAX_BODY_BYTES):
        yield data[start : start + MAX_BODY_BYTES]
