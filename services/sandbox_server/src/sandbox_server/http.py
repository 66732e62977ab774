"""Requests and answers directly on ASGI: one object less per request than a framework's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from sandbox_server.errors import ApiError
from sandbox_server.values import parse_object

__all__ = [
    "ClientGoneError",
    "Receive",
    "Request",
    "Response",
    "Scope",
    "Send",
    "error_response",
    "json_response",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_MAX_DRAINED_BYTES = 256 << 20
_DRAIN_TIMEOUT_S = 20.0

Headers = Iterable[tuple[str, str]]


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


class Request:
    """One HTTP request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self._raw = receive
        self._complete = False
        self.receive: Receive = self._receive_raw
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        counts = Counter(name.decode("latin-1") for name, _ in scope["headers"])
        self.repeated = {name for name, count in counts.items() if count > 1}
        self._query: dict[str, list[str]] | None = None

    async def _receive_raw(self) -> MutableMapping[str, Any]:
        message = await self._raw()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._complete = True
        return message

    @property
    def query(self) -> dict[str, list[str]]:
        """The query parameters."""
        if self._query is None:
            self._query = parse_qs(
                self.scope["query_string"].decode("latin-1"), keep_blank_values=True
            )
        return self._query

    def parameter(self, name: str) -> str | None:
        """Return the first value of a query parameter."""
        values = self.query.get(name)
        return values[0] if values else None

    def number(self, name: str, *, least: int, most: int, default: int) -> int:
        """Return a whole number from the query.

        Raises:
            ApiError: It is none, or outside the range.
        """
        text = self.parameter(name)
        if text is None:
            return default
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise ApiError(400, f"{name}={text!r} is not a number in {least}..{most}")
        return int(text)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces.

        Raises:
            ClientGoneError: The client left in the middle.
        """
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    async def wait_gone(self) -> None:
        """Wait until the client has closed the connection; the rest of the body is dropped."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def drain(self) -> None:
        """Read and drop the rest of the body, so that a client that still sends hears the answer.

        Bounded: at most 256 MiB and 20 s.
        """
        left = _MAX_DRAINED_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while left > 0 and not self._complete:
                    message = await self._receive_raw()
                    if message["type"] == "http.disconnect":
                        return
                    left -= len(message.get("body", b""))

    async def body(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            ApiError: It is longer than `limit` bytes (413).
            ClientGoneError: The client left in the middle.
        """
        parts: list[bytes] = []
        size = 0
        async for part in self.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the request is longer than {limit} bytes")
            parts.append(part)
        return b"".join(parts)

    async def json(self, limit: int) -> dict[str, Any]:
        """Return the body as a JSON object; an empty one is `{}`.

        Raises:
            ApiError: It is not a JSON object, or too long.
            ClientGoneError: The client left in the middle.
        """
        return parse_object(await self.body(limit), "the request")


class Response:
    """One HTTP answer, whole."""

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        *,
        content_type: str = "application/json",
        headers: Headers = (),
    ) -> None:
        self.status = status
        self.body = body
        self.headers = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in headers
        ]
        if status != 204:
            self.headers.append((b"content-type", content_type.encode("latin-1")))
            self.headers.append((b"content-length", str(len(body)).encode()))

    async def send(self, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    """Return an answer with a JSON body."""
    return Response(status, json.dumps(value, separators=(",", ":")).encode(), headers=headers)


def error_response(error: ApiError) -> Response:
    """Return the answer for an error, in the form of the E2B API."""
    headers = [] if error.retry_after_s is None else [("retry-after", str(error.retry_after_s))]
    return json_response({"code": error.status, "message": error.message}, error.status, headers)
