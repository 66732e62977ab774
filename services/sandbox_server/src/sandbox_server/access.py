"""Who may use the control plane."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from sandbox_server.errors import ApiError
from sandbox_server.http import Request

__all__ = ["check_access", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_access(request: Request, api_key: str | None) -> None:
    """Let a request pass.

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
