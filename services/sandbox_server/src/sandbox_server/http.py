"""Bodies of requests, read within a limit; answers in JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from sandbox_server.errors import ApiError

_MAX_DRAINED_BYTES = 256 << 20
_DRAIN_TIMEOUT_S = 20.0

Model = TypeVar("Model", bound=BaseModel)


class Body:
    """The body of a request, in pieces.

    Args:
        request: The request.
        limit: Bytes that are accepted.
        too_long: Raised instead of a piece that goes over the limit.
    """

    def __init__(self, request: Request, limit: int, too_long: ApiError) -> None:
        self._receive = request.receive
        self._left = limit
        self._too_long = too_long
        self._complete = False
        announced = request.headers.get("content-length", "")
        self._announced = int(announced) if announced.isdigit() else 0

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives.

        Raises:
            ApiError: It is too long.
            ClientDisconnect: The client left in the middle.
        """
        if self._announced > self._left:
            raise self._too_long
        while not self._complete:
            piece = await self._next()
            self._left -= len(piece)
            if self._left < 0:
                raise self._too_long
            yield piece

    async def drain(self) -> None:
        """Read and drop the rest of the body, so that a client that still sends hears the answer.

        Bounded: at most 256 MiB and 20 s.
        """
        dropped = 0
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while not self._complete and dropped < _MAX_DRAINED_BYTES:
                    dropped += len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self._complete = not message.get("more_body")
        return message.get("body", b"")


async def read(request: Request, model: type[Model]) -> Model:
    """Return the JSON body of a request, checked; an empty one is `{}`.

    Raises:
        ApiError: It is not JSON (400), or too long (413).
        ValidationError: It does not fit the model.
        ClientDisconnect: The client left in the middle.
    """
    limit: int = request.app.config.max_request_bytes
    body = Body(request, limit, ApiError(413, f"the request is longer than {limit} bytes"))
    return parse(b"".join([piece async for piece in body.pieces()]), model)


def parse(data: bytes, model: type[Model]) -> Model:
    """Return a JSON text, checked; errors as `read`."""
    try:
        value = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        raise ApiError(400, f"the request is not JSON: {error}") from error
    return model.model_validate(value)


async def while_connected(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, which answers a request, until it ends or the client leaves."""
    answer = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finished = answer.done()
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
    if finished:
        answer.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # the rest of the body is dropped


class JsonResponse(Response):
    """An answer in JSON, ASCII only: a file name may hold what UTF-8 cannot."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the text of the content."""
        return json.dumps(content, separators=(",", ":")).encode()


def error_response(error: ApiError) -> Response:
    """Return the answer for an error, in the form of the E2B API."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    message = {"code": error.status, "message": error.message}
    return JsonResponse(message, error.status, headers=headers)
