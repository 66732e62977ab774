"""Requests that are for one sandbox: what runs as `envd` inside a real one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Any

from sandbox_server.connect import as_api_error, serve_client_stream, serve_stream, serve_unary
from sandbox_server.errors import ApiError, from_guest
from sandbox_server.files_http import download, upload
from sandbox_server.filesystem_rpc import FilesystemService
from sandbox_server.http import ClientGoneError, Request, Response, Send, error_response
from sandbox_server.process_rpc import ProcessService
from sandbox_server.record import SandboxRecord
from twinkle_isolation import GuestError, SandboxLostError

__all__ = ["serve_envd"]

_FILESYSTEM_UNARY = {
    "Stat": FilesystemService.stat,
    "MakeDir": FilesystemService.make_dir,
    "Move": FilesystemService.move,
    "ListDir": FilesystemService.list_dir,
    "Remove": FilesystemService.remove,
    "CreateWatcher": FilesystemService.create_watcher,
    "GetWatcherEvents": FilesystemService.get_watcher_events,
    "RemoveWatcher": FilesystemService.remove_watcher,
}
_PROCESS_UNARY = {
    "List": ProcessService.list,
    "SendInput": ProcessService.send_input,
    "SendSignal": ProcessService.send_signal,
    "CloseStdin": ProcessService.close_stdin,
    "Update": ProcessService.update,
}
_PROCESS_STREAM: dict[str, Callable[..., Any]] = {
    "Start": ProcessService.start,
    "Connect": ProcessService.connect,
}


def check_sandbox_access(record: SandboxRecord, request: Request) -> None:
    """Let a request to a sandbox pass; with the sandbox's token or, for files, a signature.

    Its health may be asked for without, while it runs.

    Raises:
        ApiError: It has neither (401).
    """
    if request.path == "/health" and record.state == "running":
        return
    if _is_signed(record, request):
        _check_signature(record, request, "read" if request.method == "GET" else "write")
    else:
        _check_token(record, request)


async def serve_envd(
    record: SandboxRecord, request: Request, send: Send, *, max_output: int, max_request: int
) -> None:
    """Answer one request for one sandbox, which runs and which the request may use."""
    try:
        if request.path == "/health":
            await Response(204).send(send)
            return
        signed = _is_signed(record, request)
        if request.path == "/files":
            await _files(record, request, send, signed=signed)
            return
        user = _user(request)
        service, _, method = request.path.removeprefix("/").partition("/")
        if request.method != "POST":
            raise ApiError(404, f"route not found: {request.method} {request.path}")
        if service == "filesystem.Filesystem":
            filesystem = FilesystemService(record, request, user)
            if method in _FILESYSTEM_UNARY:
                handler = _FILESYSTEM_UNARY[method].__get__(filesystem)
                await (await serve_unary(request, handler, max_request)).send(send)
                return
            if method == "WatchDir":
                await serve_stream(request, filesystem.watch_dir, send, max_request)
                return
        elif service == "process.Process":
            process = ProcessService(record, request, user, max_output)
            if method in _PROCESS_UNARY:
                handler = _PROCESS_UNARY[method].__get__(process)
                await (await serve_unary(request, handler, max_request)).send(send)
                return
            if method in _PROCESS_STREAM:
                await serve_stream(
                    request, _PROCESS_STREAM[method].__get__(process), send, max_request
                )
                return
            if method == "StreamInput":
                await serve_client_stream(request, process.stream_input, send, max_request)
                return
        raise ApiError(404, f"route not found: {request.method} {request.path}")
    except ApiError as error:
        await error_response(error).send(send)


async def _files(record: SandboxRecord, request: Request, send: Send, *, signed: bool) -> None:
    # A signature is for the user that it names, whatever else the request says.
    asked = None if signed else _user(request)
    user = request.parameter("username") or asked or record.default_user
    started = False

    async def watched(message: Any) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        if request.method == "GET":
            await download(record, request, user, watched)
            return
        if request.method == "POST":
            await (await upload(record, request, user)).send(watched)
            return
        raise ApiError(405, f"{request.method} /files: use GET or POST")
    except ClientGoneError:
        return
    except (ApiError, GuestError, SandboxLostError) as error:
        if started:
            raise
        failure = from_guest(error) if isinstance(error, GuestError) else as_api_error(error)
        if request.method == "POST":
            await request.drain()
        await error_response(failure).send(send)


def _user(request: Request) -> str | None:
    text = request.headers.get("authorization", "")
    kind, _, value = text.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[0] or None
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ApiError(401, f"the Authorization header is not basic: {error}") from error


def _check_token(record: SandboxRecord, request: Request) -> None:
    if record.token is None:
        return
    if not hmac.compare_digest(
        request.headers.get("x-access-token", "").encode(), record.token.encode()
    ):
        raise ApiError(401, "X-Access-Token is missing or not that of this sandbox")


def _is_signed(record: SandboxRecord, request: Request) -> bool:
    """Tell whether a signature, not the token, says that the request may use the sandbox."""
    signature = request.parameter("signature")
    return request.path == "/files" and record.token is not None and signature is not None


def _check_signature(record: SandboxRecord, request: Request, operation: str) -> None:
    assert record.token is not None
    signature = request.parameter("signature") or ""
    expiration = request.parameter("signature_expiration")
    text = ":".join(
        [
            request.parameter("path") or "",
            operation,
            request.parameter("username") or "",
            record.token,
            *([] if expiration is None else [expiration]),
        ]
    )
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    if not hmac.compare_digest(f"v1_{digest}".encode(), signature.encode()):
        raise ApiError(401, "the signature does not fit the request")
    if expiration is not None and (not expiration.isdigit() or int(expiration) < time.time()):
        raise ApiError(401, "the signature has expired")
