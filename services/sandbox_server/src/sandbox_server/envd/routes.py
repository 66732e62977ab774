"""Which function answers which requests for one sandbox."""

from __future__ import annotations

import base64
import binascii

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from sandbox_server.auth import is_signed
from sandbox_server.envd import filesystem, process
from sandbox_server.envd.connect import Call, serve_client_stream, serve_stream, serve_unary
from sandbox_server.envd.files import serve_files
from sandbox_server.errors import ApiError
from sandbox_server.record import SandboxRecord

_UNARY = filesystem.UNARY | process.UNARY
_STREAMS = filesystem.STREAMS | process.STREAMS
_CLIENT_STREAMS = process.CLIENT_STREAMS


async def serve_envd(record: SandboxRecord, request: Request, send: Send) -> None:
    """Answer one request for a sandbox that runs and that the request may use."""
    path = request.scope["path"]
    if path == "/health":
        await Response(status_code=204)(request.scope, request.receive, send)
    elif path == "/files":
        # A signature is for the user that it names, whatever else the request says.
        asked = None if is_signed(record, request) else _user(request)
        user = request.query_params.get("username") or asked or record.default_user
        await serve_files(record, request, user, send)
    else:
        call = Call(record, request, _user(request) or record.default_user)
        if request.method != "POST" or path not in _UNARY | _STREAMS | _CLIENT_STREAMS:
            raise ApiError(404, f"route not found: {request.method} {path}")
        if path in _UNARY:
            response = await serve_unary(call, *_UNARY[path])
            await response(request.scope, request.receive, send)
        elif path in _STREAMS:
            await serve_stream(call, *_STREAMS[path], send)
        else:
            await serve_client_stream(call, *_CLIENT_STREAMS[path], send)


def _user(request: Request) -> str | None:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ApiError(401, f"the Authorization header is not basic: {error}") from error
