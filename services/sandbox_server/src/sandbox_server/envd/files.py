"""`GET /files` and `POST /files` of envd: the content of files, in both directions, streamed."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from sandbox_server.envd.filesystem import locate
from sandbox_server.envd.forms import FormEvent, file_content, form_events
from sandbox_server.errors import ApiError, as_api_error
from sandbox_server.http import Body, JsonResponse, error_response, while_connected
from sandbox_server.record import SandboxRecord

_CHUNK_BYTES = 256 * 1024
_WHOLE_BYTES = 1 << 20  # up to this an answer has a length and is sent at once
_MAX_DOWNLOAD_BYTES = 16 << 30
_FORM_BYTES = 1 << 20  # what a form adds to its files
_MAX_GZIP_MEMBERS = 1000


async def serve_files(record: SandboxRecord, request: Request, user: str, send: Send) -> None:
    """Answer a request for the content of files."""
    started = False

    async def watched(message: Message) -> None:
        nonlocal started
        started = True
        await send(message)

    limit = record.disk_bytes + _FORM_BYTES
    too_long = ApiError(507, f"not enough space: the upload is longer than {limit} bytes")
    body = Body(request, limit, too_long)
    try:
        if request.method == "GET":
            await download(record, request, user, watched)
            return
        if request.method != "POST":
            raise ApiError(405, f"{request.method} /files: use GET or POST")
        response: Response = JsonResponse(await upload(record, request, body, user))
    except Exception as error:
        if started:
            raise
        response = error_response(as_api_error(error))
        if request.method == "POST":
            await body.drain()
    await response(request.scope, request.receive, send)


async def download(record: SandboxRecord, request: Request, user: str, send: Send) -> None:
    """Send one file of at most 16 GiB, as long as the client is there.

    An error in the middle breaks the connection: a part is never taken for the whole.
    """
    path = request.query_params.get("path")
    if path is None:
        raise ApiError(400, "the query parameter `path` is missing")
    size, pieces = await record.sandbox.open_read(
        locate(record, path), user=user, limit_bytes=_MAX_DOWNLOAD_BYTES
    )
    async with contextlib.aclosing(pieces):
        if size > _MAX_DOWNLOAD_BYTES:
            await anext(pieces)  # started, so that its end tells the sandbox
            raise ApiError(413, f"{path!r} is longer than {_MAX_DOWNLOAD_BYTES} bytes: {size}")
        await while_connected(request, _send_pieces(request, pieces, size, send))


async def _send_pieces(
    request: Request, pieces: AsyncIterator[bytes], size: int, send: Send
) -> None:
    kept = bytearray()
    if size <= _WHOLE_BYTES:
        async for piece in pieces:
            kept += piece
            if len(kept) > _WHOLE_BYTES:  # it grew, or has no true size (a file of /proc)
                break
        else:
            whole = Response(bytes(kept), media_type="application/octet-stream")
            await whole(request.scope, request.receive, send)
            return
    headers = [(b"content-type", b"application/octet-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": bytes(kept), "more_body": True})
    async for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def upload(
    record: SandboxRecord, request: Request, body: Body, user: str
) -> list[dict[str, Any]]:
    """Write one file (octet-stream) or several (multipart); return what was written."""
    content_type = request.headers.get("content-type", "")
    kind = content_type.partition(";")[0].strip().lower()
    path = request.query_params.get("path")
    if kind == "multipart/form-data":
        return await _multipart(record, form_events(content_type, body.pieces()), path, user)
    if not path:
        raise ApiError(400, "the query parameter `path` is missing")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("gzip", "identity"):
        raise ApiError(415, f"content-encoding {encoding!r} is not supported: gzip or identity")
    source = _gunzip(body.pieces()) if encoding == "gzip" else body.pieces()
    return [await _write(record, path, source, user)]


async def _multipart(
    record: SandboxRecord, events: AsyncIterator[FormEvent], path: str | None, user: str
) -> list[dict[str, Any]]:
    """Write the files of a form while it arrives, so that the server never holds one."""
    written: list[dict[str, Any]] = []
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
