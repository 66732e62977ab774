"""The Connect protocol with its JSON codec: unary calls, and streams of enveloped messages.

Source: https://connectrpc.com/docs/protocol (version 1). Compression is not offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from sandbox_server.errors import CONNECT_STATUS, ApiError, as_api_error
from sandbox_server.http import JsonResponse, parse, read, while_connected
from sandbox_server.models import Message
from sandbox_server.record import SandboxRecord

Answer = dict[str, Any]
Method = tuple[type[Message], Callable[..., Any]]
"""The model of what a method takes, and its handler."""
Received = TypeVar("Received", bound=Message)

_ENVELOPE = struct.Struct("!BI")
_DEFAULT_KEEPALIVE_S = 90.0
_COMPRESSED = 0x01
_END_OF_STREAM = 0x02


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method for one sandbox, as `user`."""

    record: SandboxRecord
    request: Request
    user: str

    @property
    def timeout_s(self) -> float | None:
        """The deadline in seconds from now."""
        text = self.request.headers.get("connect-timeout-ms")
        if text is None:
            return None
        if not (text.isascii() and text.isdigit()) or len(text) > 10:
            raise ApiError(
                400, f"connect-timeout-ms={text!r} is not a number of at most ten digits"
            )
        return int(text) / 1000

    @property
    def keepalive_s(self) -> float:
        """After how many quiet seconds a stream sends something."""
        text = self.request.headers.get("keepalive-ping-interval", "")
        valid = text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0
        return float(text) if valid else _DEFAULT_KEEPALIVE_S


async def serve_unary(
    call: Call, model: type[Received], handler: Callable[[Call, Received], Awaitable[Answer]]
) -> Response:
    """Answer a call with one message each way."""
    try:
        deadline = call.timeout_s
        message = await read(call.request, model)
        async with asyncio.timeout(deadline):
            return JsonResponse(await handler(call, message))
    except Exception as error:
        failure = as_api_error(error)
    return JsonResponse(_described(failure), CONNECT_STATUS.get(failure.code, 500))


async def serve_stream(
    call: Call,
    model: type[Received],
    handler: Callable[[Call, Received], AsyncGenerator[Answer, None]],
    send: Send,
) -> None:
    """Answer a call whose answer is a stream. The handler is closed when the client leaves."""
    try:
        message = parse(await _one_message(call), model)
    except Exception as error:
        await _start(send)
        await _send_end(send, as_api_error(error))
        return
    await _start(send)
    await while_connected(call.request, _send_all(handler(call, message), send))


async def serve_client_stream(
    call: Call,
    model: type[Received],
    handler: Callable[[Call, AsyncIterator[Received]], Awaitable[Answer]],
    send: Send,
) -> None:
    """Answer a call whose request is a stream."""
    failure: ApiError | None = None
    answer: Answer | None = None
    try:
        answer = await handler(call, (parse(body, model) async for body in _read_envelopes(call)))
    except Exception as error:
        failure = as_api_error(error)
    await _start(send)
    if answer is not None:
        await _send_envelope(send, answer)
    await _send_end(send, failure)


async def _send_all(messages: AsyncGenerator[Answer, None], send: Send) -> None:
    failure: ApiError | None = None
    try:
        async with contextlib.aclosing(messages):
            async for message in messages:
                await _send_envelope(send, message)
    except Exception as error:
        failure = as_api_error(error)
    await _send_end(send, failure)


async def _one_message(call: Call) -> bytes:
    """Return the one message of a stream; a second one is refused before it is kept."""
    only: bytes | None = None
    async with contextlib.aclosing(_read_envelopes(call)) as messages:
        async for message in messages:
            if only is not None:
                raise ApiError(400, "expected one message, found more")
            only = message
    if only is None:
        raise ApiError(400, "expected one message, found none")
    return only


async def _read_envelopes(call: Call) -> AsyncGenerator[bytes, None]:
    limit: int = call.request.app.config.max_request_bytes
    data = bytearray()
    async for part in call.request.stream():
        data += part
        while len(data) >= _ENVELOPE.size:
            flags, length = _ENVELOPE.unpack_from(data)
            if flags & _COMPRESSED:
                raise ApiError(501, "compressed messages are not supported")
            if length > limit:
                raise ApiError(413, f"a message of {length} bytes is longer than {limit}")
            end = _ENVELOPE.size + length
            if len(data) < end:
                break
            body = bytes(data[_ENVELOPE.size : end])
            del data[:end]
            if not flags & _END_OF_STREAM:
                yield body
        if len(data) > limit + _ENVELOPE.size:
            raise ApiError(413, f"the request is longer than {limit} bytes")
    if data:
        raise ApiError(400, f"the request ends in the middle of a message ({len(data)} bytes)")


def _described(failure: ApiError) -> Answer:
    return {"code": failure.code, "message": failure.message}


async def _start(send: Send) -> None:
    headers = [(b"content-type", b"application/connect+json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_end(send: Send, failure: ApiError | None) -> None:
    end = {} if failure is None else {"error": _described(failure)}
    await _send_envelope(send, end, flags=_END_OF_STREAM)


async def _send_envelope(send: Send, message: Answer, flags: int = 0) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    envelope = _ENVELOPE.pack(flags, len(body)) + body
    more = not flags & _END_OF_STREAM
    await send({"type": "http.response.body", "body": envelope, "more_body": more})
