"""`GET /files` and `POST /files` of envd: the content of files, in both directions, streamed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import zlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as StarletteRequest

from sandbox_server.errors import ApiError
from sandbox_server.filesystem_rpc import locate
from sandbox_server.http import ClientGoneError, Request, Response, Send, json_response
from sandbox_server.record import SandboxRecord

__all__ = ["download", "upload"]

_CHUNK_BYTES = 256 * 1024
_WHOLE_BYTES = 1 << 20  # up to this an answer has a length and is sent at once
_MAX_DOWNLOAD_BYTES = 16 << 30
_MAX_FILES = 1000
_FORM_BYTES = 1 << 20  # what a form adds to its files


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
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    path = request.parameter("path")
    _limit_body(request, record.disk_bytes + _FORM_BYTES)
    if kind == "multipart/form-data":
        return json_response(await _multipart(record, request, user, path))
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
    record: SandboxRecord, request: Request, user: str, path: str | None
) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    starlette_request = StarletteRequest(request.scope, request.receive)
    async with contextlib.AsyncExitStack() as stack:
        try:
            form = await stack.enter_async_context(starlette_request.form(max_files=_MAX_FILES))
        except ClientDisconnect as error:
            raise ClientGoneError from error
        except MultiPartException as error:
            raise ApiError(400, f"the form cannot be read: {error.message}") from error
        except OSError as error:
            raise ApiError(507, f"the server has no room for the form: {error}") from error
        uploads = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not uploads:
            raise ApiError(400, "the form holds no file: send a part named `file` with a filename")
        for item in uploads:
            target = path if path and len(uploads) == 1 else item.filename
            if not target:
                raise ApiError(400, "a file of the form has no name")
            written.append(await _write(record, target, _read(item), user))
    return written


async def _write(
    record: SandboxRecord, path: str, source: AsyncIterator[bytes], user: str
) -> dict[str, Any]:
    entry = await record.sandbox.write_file(locate(record, path), source, user=user)
    return {"name": os.path.basename(entry.path), "type": "file", "path": entry.path}


async def _read(item: UploadFile) -> AsyncIterator[bytes]:
    while piece := await item.read(_CHUNK_BYTES):
        yield piece


async def _gunzip(source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    decoder = zlib.decompressobj(wbits=31)
    try:
        async for piece in source:
            data = piece
            while data:
                if decoder.eof:  # a body may have several members, one after the other
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
