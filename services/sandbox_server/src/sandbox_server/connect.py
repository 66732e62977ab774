"""The Connect protocol with its JSON codec: unary calls, and streams of enveloped messages.

Source: https://connectrpc.com/docs/protocol (version 1). Compression is not offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from sandbox_server.errors import CONNECT_STATUS, ApiError, from_guest
from sandbox_server.http import ClientGoneError, Request, Response, Send, json_response
from sandbox_server.values import parse_object
from twinkle_isolation import GuestError, SandboxLostError

logger = logging.getLogger(__name__)
__all__ = [
    "Message",
    "as_api_error",
    "keepalive_s",
    "serve_client_stream",
    "serve_stream",
    "serve_unary",
    "timeout_s",
]

Message = dict[str, Any]
UnaryHandler = Callable[[Message], Awaitable[Message]]
StreamHandler = Callable[[Message], AsyncGenerator[Message, None]]

_ENVELOPE = struct.Struct("!BI")
_DEFAULT_KEEPALIVE_S = 90.0
_COMPRESSED = 0x01
_END_OF_STREAM = 0x02


def timeout_s(request: Request) -> float | None:
    """Return the deadline of a request in seconds from now.

    Raises:
        ApiError: The header is not a number.
    """
    text = request.headers.get("connect-timeout-ms")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 10:
        raise ApiError(400, f"connect-timeout-ms={text!r} is not a number of at most ten digits")
    return int(text) / 1000


def keepalive_s(request: Request) -> float:
    """Return after how many quiet seconds a stream sends something."""
    text = request.headers.get("keepalive-ping-interval", "")
    valid = text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0
    return float(text) if valid else _DEFAULT_KEEPALIVE_S


def as_api_error(error: Exception) -> ApiError:
    """Return the answer for whatever a handler raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GuestError):
        return from_guest(error)
    if isinstance(error, SandboxLostError):
        return ApiError(502, f"the sandbox was not found: {error}", code="unavailable")
    logger.error("a handler failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}: {error}")


async def serve_unary(request: Request, handler: UnaryHandler, limit: int) -> Response:
    """Answer one unary call."""
    try:
        deadline = timeout_s(request)
        message = await request.json(limit)
        async with asyncio.timeout(deadline):
            return json_response(await handler(message))
    except ClientGoneError:
        return Response(499)
    except TimeoutError:
        failure = ApiError(
            504, "the request took longer than its deadline", code="deadline_exceeded"
        )
    except Exception as error:
        failure = as_api_error(error)
    status = CONNECT_STATUS.get(failure.code, 500)
    return json_response({"code": failure.code, "message": failure.message}, status)


async def serve_stream(request: Request, handler: StreamHandler, send: Send, limit: int) -> None:
    """Answer a call whose answer is a stream. The handler is closed when the client leaves."""
    try:
        message = await _one_message(request, limit)
    except ClientGoneError:
        return
    except Exception as error:
        await _start(send)
        await _send_end(send, as_api_error(error))
        return
    await _start(send)
    pump = asyncio.create_task(_pump(handler(message), send))
    gone = asyncio.create_task(request.wait_gone())
    try:
        await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (pump, gone):
            task.cancel()
        await asyncio.gather(pump, gone, return_exceptions=True)


async def serve_client_stream(
    request: Request,
    handler: Callable[[AsyncIterator[Message]], Awaitable[Message]],
    send: Send,
    limit: int,
) -> None:
    """Answer a call whose request is a stream."""
    failure: ApiError | None = None
    answer: Message | None = None
    try:
        answer = await handler(_read_envelopes(request, limit))
    except ClientGoneError:
        return
    except Exception as error:
        failure = as_api_error(error)
    await _start(send)
    if answer is not None:
        await _send_message(send, answer)
    await _send_end(send, failure)


async def _pump(messages: AsyncGenerator[Message, None], send: Send) -> None:
    failure: ApiError | None = None
    try:
        async with contextlib.aclosing(messages):
            async for message in messages:
                await _send_message(send, message)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        failure = as_api_error(error)
    await _send_end(send, failure)


async def _one_message(request: Request, limit: int) -> Message:
    """Return the one message of a stream; a second one is refused before it is kept."""
    only: Message | None = None
    async with contextlib.aclosing(_read_envelopes(request, limit)) as messages:
        async for message in messages:
            if only is not None:
                raise ApiError(400, "expected one message, found more")
            only = message
    if only is None:
        raise ApiError(400, "expected one message, found none")
    return only


async def _read_envelopes(request: Request, limit: int) -> AsyncGenerator[Message, None]:
    data = bytearray()
    async for part in request.stream():
        data += part
        while len(data) >= _ENVELOPE.size:
            flags, length = _ENVELOPE.unpack_from(data)
            if flags & _COMPRESSED:
                raise ApiError(501, "compressed messages are not supported", code="unimplemented")
            if length > limit:
                raise ApiError(413, f"a message of {length} bytes is longer than {limit}")
            end = _ENVELOPE.size + length
            if len(data) < end:
                break
            body = bytes(data[_ENVELOPE.size : end])
            del data[:end]
            if not flags & _END_OF_STREAM:
                yield parse_object(body, "a message")
        if len(data) > limit + _ENVELOPE.size:
            raise ApiError(413, f"the request is longer than {limit} bytes")
    if data:
        raise ApiError(400, f"the request ends in the middle of a message ({len(data)} bytes)")


async def _start(send: Send) -> None:
    headers = [(b"content-type", b"application/connect+json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_message(send: Send, message: Mapping[str, Any]) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    envelope = _ENVELOPE.pack(0, len(body)) + body
    await send({"type": "http.response.body", "body": envelope, "more_body": True})


async def _send_end(send: Send, failure: ApiError | None) -> None:
    end: Message = {}
    if failure is not None:
        end = {"error": {"code": failure.code, "message": failure.message}}
    body = json.dumps(end, separators=(",", ":")).encode()
    envelope = _ENVELOPE.pack(_END_OF_STREAM, len(body)) + body
    await send({"type": "http.response.body", "body": envelope, "more_body": False})
