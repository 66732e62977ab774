"""Which function answers which requests to the code interpreter of a sandbox."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from sandbox_server.errors import ApiError
from sandbox_server.http import JsonResponse, read, while_connected
from sandbox_server.interpreter.contexts import Context, Run
from sandbox_server.interpreter.results import Emit, Event
from sandbox_server.models import Environment, Message, Text
from sandbox_server.record import SandboxRecord
from twinkle_isolation import SandboxLostError

logger = logging.getLogger(__name__)
_KEEPALIVE_S = 5.0
_SEND_TIMEOUT_S = 60.0  # a client that reads nothing for so long has left
_CONTEXT = re.compile(r"/contexts/(?P<id>[^/]{1,100})(?P<restart>/restart)?")


class _CreateRequest(Message):
    language: Text | None = None
    cwd: Text | None = None


class _RunRequest(Message):
    code: str
    context_id: Text | None = None
    language: Text | None = None
    env_vars: Environment = Field(default={})
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


async def serve_interpreter(record: SandboxRecord, request: Request, send: Send) -> None:
    """Answer one request to the interpreter of a sandbox that runs and that it may use.

    Raises:
        ApiError: There is no such route or context, or a language other than Python was asked for.
    """
    what = (request.method, request.scope["path"])
    if what == ("POST", "/execute"):
        await _execute(record, request, send)
        return
    if what == ("GET", "/health"):
        response: Response = JsonResponse("OK")
    elif what == ("GET", "/contexts"):
        response = JsonResponse([_described(c) for c in record.contexts.all(record)])
    elif what == ("POST", "/contexts"):
        wanted = await read(request, _CreateRequest)
        _check_language(wanted.language)
        context = await record.contexts.create(record, wanted.cwd)
        if await request.is_disconnected():
            record.contexts.remove(context)  # its client never learns its id
        response = JsonResponse(_described(context))
    else:
        response = _change(record, request)
    await response(request.scope, request.receive, send)


def _change(record: SandboxRecord, request: Request) -> Response:
    """Remove or restart a context."""
    match = _CONTEXT.fullmatch(request.scope["path"])
    wanted = "POST" if match is not None and match["restart"] else "DELETE"
    if match is None or request.method != wanted:
        raise ApiError(404, f"route not found: {request.method} {request.scope['path']}")
    context = record.contexts.find(record, match["id"])
    if match["restart"]:
        context.end()
    else:
        record.contexts.remove(context)
    return JsonResponse(None)


def _check_language(language: str | None) -> None:
    if language is not None and language.strip().lower() not in ("", "python", "python3"):
        raise ApiError(
            400, f"language {language!r} is not supported by this server: it runs python alone"
        )


def _described(context: Context) -> dict[str, Any]:
    return {"id": context.context_id, "language": "python", "cwd": context.cwd}


async def _execute(record: SandboxRecord, request: Request, send: Send) -> None:
    wanted = await read(request, _RunRequest)
    if wanted.context_id is not None and wanted.language is not None:
        raise ApiError(400, "context_id and language exclude each other: give one of them")
    _check_language(wanted.language)
    context = record.contexts.find(record, wanted.context_id)
    config = request.app.config
    in_turn = asyncio.Lock()

    async def emit(event: Event) -> None:
        # A result may be too deep for this, or 1e999, which is no JSON once it was read.
        body = json.dumps(event, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        async with in_turn:
            if run.abandoned:
                return
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                run.abandon()

    run = Run(
        wanted.code,
        wanted.env_vars,
        timeout_s=min(config.run_timeout_s, wanted.timeout or config.run_timeout_s),
        output_bytes=config.max_output_bytes,
        emit=emit,
    )
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    # A task of its own: when the client leaves, the code is still stopped and its end awaited.
    work = request.app.registry.spawn(context.execute(run))
    work.add_done_callback(_log_failure)
    try:
        await while_connected(request, _follow(work, emit))
    finally:
        if not work.done():
            run.abandon()
    if run.abandoned or work.exception() is not None:
        return  # without an end, which tells the client that the sandbox is lost
    await emit({"type": "end_of_execution"})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _follow(work: asyncio.Task[None], emit: Emit) -> None:
    """Wait for the end of a run, and send something in every quiet interval."""
    while not (await asyncio.wait({work}, timeout=_KEEPALIVE_S))[0]:
        await emit({"type": "keepalive"})


def _log_failure(work: asyncio.Task[None]) -> None:
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, SandboxLostError):
        logger.error("a run of code failed", exc_info=error)
