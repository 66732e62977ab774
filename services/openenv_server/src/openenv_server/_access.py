"""Who may use the server: clients with a token, or, without one, programs that are no web page.

Any page a browser shows may open a connection to a server on the reader's own machine, so a server
without a token refuses pages of other origins. Browsers say in `Origin` where a page came from;
other clients do not send it. With a token there is nothing to guard: a page cannot send it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["AccessGuard"]

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_OPEN_PATHS = ("/health",)  # a load balancer has no token


class AccessGuard:
    """ASGI middleware: answers 401 without a token, 403 to pages of other origins.

    A connection to a loopback address must name the server by such an address or `localhost` in
    `Host`: else a foreign name that was made to point at this machine would count as ours.

    Args:
        app: The application behind it.
        tokens: Secrets of which a client must send one; empty asks for none.
        allowed_hosts: Further names of a server without tokens, without port: what a proxy on the
            same machine passes on in `Host`, and the hosts of pages that may use the server.
        only_loopback: Without tokens, refuse connections to any other address.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        tokens: Iterable[str] = (),
        allowed_hosts: Iterable[str] = (),
        only_loopback: bool = False,
    ) -> None:
        self._app = app
        self._tokens = [_digest(token.encode()) for token in tokens]
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._only_loopback = only_loopback

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Pass a request on, or refuse it."""
        refusal = None
        if scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN_PATHS:
            refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, why = refusal
        # Before a websocket is accepted its handshake is answered like any other request.
        kind = "websocket.http" if scope["type"] == "websocket" else "http"
        headers = [(b"content-type", b"application/json")]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
        body = json.dumps({"detail": why}).encode()
        await send({"type": f"{kind}.response.body", "body": body})

    def _refusal(self, scope: _Scope) -> tuple[int, str] | None:
        wanted = (b"host", b"origin", b"authorization")
        headers = {k.lower(): v for k, v in scope["headers"] if k.lower() in wanted}
        if self._tokens:
            return self._check_token(scope, headers.get(b"authorization", b""))
        host = headers.get(b"host", b"").decode("latin-1")
        bound_to: Any = scope.get("server")
        here = bool(bound_to) and _is_loopback(str(bound_to[0]))
        if self._only_loopback and not here:
            return 403, "the server runs the code it is sent and has no token: give it one"
        if here and not _is_loopback(name := _name(f"//{host}")) and name not in self._allowed:
            return 403, f"the server on this machine was asked as {host!r}: {_HELP}"
        if b"origin" not in headers:
            return None
        origin = headers[b"origin"].decode("latin-1")
        same = origin.lower().partition("://")[2] == host.lower()
        if same or _name(origin) in self._allowed:
            return None
        return 403, f"a page of {origin!r} may not use this server: {_HELP}"

    def _check_token(self, scope: _Scope, authorization: bytes) -> tuple[int, str] | None:
        scheme, _, token = authorization.partition(b" ")
        given = _digest(token.strip())
        # All are compared, in constant time: the answer's delay says nothing about a token.
        matches = [hmac.compare_digest(given, each) for each in self._tokens]
        if scheme.lower() != b"bearer" or True not in matches:
            found = "another token" if authorization else "none"
            return 401, (
                f"the server wants a token and got {found}: OpenEnvClient(token=...), or "
                "headers={'Authorization': 'Bearer ...'} for another client"
            )
        scope["token_number"] = matches.index(True)
        return None


_HELP = "add its host name to ALLOWED_HOSTS (--allowed-hosts) if that is meant"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


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
