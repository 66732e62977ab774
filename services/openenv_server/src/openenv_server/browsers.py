"""Keeps pages in a browser from driving the server.

The server has no authentication, and any page may open a connection to a server on the reader's own
machine. Browsers say in `Origin` where the page came from; other clients do not send it.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["BrowserGuard"]

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class BrowserGuard:
    """ASGI middleware: refuses pages of other origins, with status 403.

    A connection to a loopback address must name the server by such an address or `localhost` in
    `Host`: else a foreign name that was made to point at this machine would count as ours.

    Args:
        app: The application behind it.
        allowed_hosts: Further names of the server, without port: what a proxy on the same machine
            passes on in `Host`, and the hosts of pages that may use the server.
    """

    def __init__(
        self, app: Callable[..., Awaitable[None]], *, allowed_hosts: Iterable[str]
    ) -> None:
        self._app = app
        self._allowed = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # before it is accepted: the server answers 403
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[:120]})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            body = json.dumps({"detail": refusal}).encode()
            await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: _Scope) -> str | None:
        headers = {
            name.lower(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name.lower() in (b"host", b"origin")
        }
        host = headers.get(b"host", "")
        name = _name(f"//{host}")
        bound_to: Any = scope.get("server")
        here = bool(bound_to) and _is_loopback(str(bound_to[0]))
        if here and not _is_loopback(name) and name not in self._allowed:
            return f"the server on this machine was asked as {host!r}: {_HELP}"
        origin = headers.get(b"origin")
        if origin is None or _name(origin) in self._allowed:
            return None
        if origin.lower().partition("://")[2] == host.lower():
            return None
        return f"a page of {origin!r} may not use this server: {_HELP}"


_HELP = "add its host name to ALLOWED_HOSTS (--allowed-hosts) if that is meant"


def _name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:  # brackets that close nothing
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
