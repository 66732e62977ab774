"""`GET /files` and `POST /files` of envd: the content of files, in both directions, streamed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import zlib
from collections.abc import AsyncIterator
from typing import Any

from sandbox_server.errors import ApiError
from sandbox_server.filesystem_rpc import locate
from sandbox_server.forms import file_content, form_events
from sandbox_server.http import Request, Response, Send, json_response
from sandbox_server.record import SandboxRecord

__all__ = ["download", "upload"]

_CHUNK_BYTES = 256 * 1024
_WHOLE_BYTES = 1 << 20  # up to this an answer has a length and is sent at once
_MAX_DOWNLOAD_BYTES = 16 << 30
_FORM_BYTES = 1 << 20  # what a form adds to its files
_MAX_GZIP_MEMBERS = 1000


async def download(record: SandboxRecord, request: Request, user: str, send: Send) -> None:
    """Send one file of at most 16 GiB, as long as the client is there.

    An error in the middle breaks the connection: a part is never taken for the whole.
    """
    path = request.parameter("path")
    if path is None:
        raise ApiError(400, "the query parameter `path` is missing")
    size, pieces = await record.sandbox.open_read(
        locate(record, path), user=user, limit_bytes=_MAX_DOWNLOAD_BYTES
    )
    async with contextlib.aclosing(pieces):
        if size > _MAX_DOWNLOAD_BYTES:
            await anext(pieces)  # begun, so that its end tells the sandbox
            raise ApiError(413, f"{path!r} is longer than {_MAX_DOWNLOAD_BYTES} bytes: {size}")
        pump = asyncio.create_task(_send_pieces(pieces, size, send))
        gone = asyncio.create_task(request.wait_gone())
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished = pump.done()
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
    if finished:
        pump.result()


async def _send_pieces(pieces: AsyncIterator[bytes], size: int, send: Send) -> None:
    if size <= _WHOLE_BYTES:
        parts: list[bytes] = []
        total = 0
        async for piece in pieces:
            parts.append(piece)
            total += len(piece)
            if total > _WHOLE_BYTES:  # it grew, or has no true size (a file of /proc)
                break
        else:
            await Response(200, b"".join(parts), content_type="application/octet-stream").send(send)
            return
        pieces = _chain(parts, pieces)
    headers = [(b"content-type", b"application/octet-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def upload(record: SandboxRecord, request: Request, user: str) -> Response:
    """Write one file (octet-stream) or several (multipart)."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    path = request.parameter("path")
    _limit_body(request, record.disk_bytes + _FORM_BYTES)
    if kind == "multipart/form-data":
        return json_response(await _multipart(record, request, user, path, content_type))
    if not path:
        raise ApiError(400, "the query parameter `path` is missing")
    source = request.stream()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "gzip":
        source = _gunzip(source)
    elif encoding != "identity":
        raise ApiError(415, f"content-encoding {encoding!r} is not supported: gzip or identity")
    return json_response([await _write(record, path, source, user)])


def _limit_body(request: Request, limit: int) -> None:
    """Refuse a body that cannot fit, before it fills the server's own disk or memory."""
    receive, size = request.receive, 0

    async def limited() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise ApiError(507, f"not enough space: the upload is longer than {limit} bytes")
        return message

    request.receive = limited
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise ApiError(507, f"not enough space: the upload has {announced} bytes, room is {limit}")


async def _multipart(
    record: SandboxRecord, request: Request, user: str, path: str | None, content_type: str
) -> list[dict[str, Any]]:
    """Write the files of a form while it arrives, so that the server never holds one."""
    written: list[dict[str, Any]] = []
    events = form_events(content_type, request.stream())
    async for _, name in events:
        if path and written:
            raise ApiError(400, f"the form holds several files, and all would be {path!r}")
        target = path or _decode(name)
        if not target:
            raise ApiError(400, "a file of the form has no name")
        written.append(await _write(record, target, file_content(events), user))
    if not written:
        raise ApiError(400, "the form holds no file: send a part named `file` with a filename")
    return written


def _decode(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


async def _write(
    record: SandboxRecord, path: str, source: AsyncIterator[bytes], user: str
) -> dict[str, Any]:
    entry = await record.sandbox.write_file(locate(record, path), source, user=user)
    return {"name": os.path.basename(entry.path), "type": "file", "path": entry.path}


async def _gunzip(source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    members = 1
    try:
        async for piece in source:
            data = piece
            while data:
                if decoder.eof:  # a body may have several members, one after the other
                    members += 1
                    if members > _MAX_GZIP_MEMBERS:
                        raise ApiError(400, f"the body has over {_MAX_GZIP_MEMBERS} gzip members")
                    decoder = zlib.decompressobj(wbits=31)
                yield decoder.decompress(data, _CHUNK_BYTES)
                data = decoder.unconsumed_tail or decoder.unused_data
        yield decoder.flush()
    except zlib.error as error:
        raise ApiError(400, f"the body is not gzip: {error}") from error
    if not decoder.eof:
        raise ApiError(400, "the gzip body ends in the middle")


async def _chain(parts: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    async for part in rest:
        yield part
