"""Who may use the control API, and who a sandbox."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import time
from urllib.parse import urlsplit

from starlette.requests import Request

from sandbox_server.errors import ApiError
from sandbox_server.record import SandboxRecord


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_control_access(request: Request, api_key: str | None) -> None:
    """Let a request to the control API pass.

    With a key, it must bring it. Without one the server listens on loopback only, and then it must
    be meant for loopback: a page in a browser on this machine can send requests here too, and its
    `Origin`, or the name that it made resolve to loopback as `Host`, gives it away.

    Raises:
        ApiError: The key is wrong (401), or the request is for another name (403).
    """
    if api_key is not None:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.headers.get("x-api-key") or bearer
        if not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(401, "X-API-Key is missing or not this server's key")
        return
    for name, url in (
        ("Host", f"//{request.headers.get('host', 'localhost')}"),
        ("Origin", request.headers.get("origin", "//localhost")),
    ):
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            host = ""
        if not is_loopback(host):
            raise ApiError(
                403, f"{name} {host!r} is not loopback: start the server with --api-key to allow it"
            )


def check_sandbox_access(
    record: SandboxRecord, request: Request, *, interpreter: bool = False
) -> None:
    """Let a request to a sandbox pass; with the sandbox's token or, for files, a signature.

    For the code interpreter the token for traffic will do: it is all that the SDKs send with some
    of these requests.

    Its health may be asked for without, while it runs.

    Raises:
        ApiError: It has neither (401).
    """
    if record.token is None or (request.scope["path"] == "/health" and record.state == "running"):
        return
    if is_signed(record, request) and not interpreter:
        _check_signature(record.token, request)
        return
    given = request.headers.get("x-access-token", "")
    allowed = hmac.compare_digest(given.encode(), record.token.encode())
    if interpreter and not allowed:
        given = request.headers.get("e2b-traffic-access-token", "")
        allowed = hmac.compare_digest(given.encode(), (record.traffic_token or "").encode())
    if not allowed:
        raise ApiError(401, "X-Access-Token is missing or not that of this sandbox")


def is_signed(record: SandboxRecord, request: Request) -> bool:
    """Tell whether a signature, not the token, says that the request may use the sandbox."""
    signed = request.scope["path"] == "/files" and "signature" in request.query_params
    return signed and record.token is not None


def _check_signature(token: str, request: Request) -> None:
    query = request.query_params
    expiration = query.get("signature_expiration")
    text = ":".join(
        [
            query.get("path", ""),
            "read" if request.method == "GET" else "write",
            query.get("username", ""),
            token,
            *([] if expiration is None else [expiration]),
        ]
    )
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
    if not hmac.compare_digest(f"v1_{digest}".encode(), query["signature"].encode()):
        raise ApiError(401, "the signature does not fit the request")
    if expiration is not None and (not expiration.isdigit() or int(expiration) < time.time()):
        raise ApiError(401, "the signature has expired")
