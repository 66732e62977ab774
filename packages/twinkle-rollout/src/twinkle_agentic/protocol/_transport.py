"""HTTP for the hot path: one POST with bounds on everything, on aiohttp.

The choice of the library, with figures: docs/decisions/0002-http-stack.md.
"""

from __future__ import annotations

import asyncio
import ssl
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from twinkle_agentic._aio.net import is_loopback
from twinkle_agentic.protocol.errors import (
    ApiConnectionError,
    ApiErrorKind,
    ApiReplyError,
)

__all__ = ["HttpTransport", "connection_limit", "proxy_for"]

_MAX_DEFAULT_CONNECTIONS = 4096
_CONNECT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Shared:
    """What the users of one event loop share.

    Attributes:
        session: Keeps its connections for further requests.
        once: Has a new connection for each request.
        slots: One for each request on the wire.
        users: How many hold a lease.
    """

    session: aiohttp.ClientSession
    once: aiohttp.ClientSession
    slots: asyncio.Semaphore
    users: int = field(default=0)


class HttpTransport:
    """Sends POST requests to one server.

    Connections belong to an event loop and live as long as somebody holds a `lease` there, so
    nothing is left open when the last request or rollout ends. Usable from several event loops at
    once.

    Args:
        url: Where to post.
        headers: Sent with each request.
        max_connections: Requests on the wire at once, per event loop; further ones wait in order,
            without a limit of their own.
        max_response_bytes: Largest reply that is read.
        proxy: URL of the proxy, `None` for a direct connection.
        tls: Certificate checks; `True` is the system's default.
    """

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        *,
        max_connections: int,
        max_response_bytes: int,
        proxy: str | None = None,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self.url = url
        self.headers = headers
        self.max_connections = max_connections
        self.max_response_bytes = max_response_bytes
        self.proxy = proxy
        self.tls = tls
        self._shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = (
            weakref.WeakKeyDictionary()
        )

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[_Shared]:
        """Keep the connections of the running loop open inside the block."""
        loop = asyncio.get_running_loop()
        shared = self._shared.get(loop)
        if shared is None:
            shared = self._shared[loop] = self._open()
        shared.users += 1
        try:
            yield shared
        finally:
            shared.users -= 1
            if shared.users == 0:
                self._shared.pop(loop, None)
                await shared.session.close()
                await shared.once.close()

    async def post(
        self,
        shared: _Shared,
        body: bytes,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
        anew: bool = False,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Send one request and read the whole reply; the caller bounds the time.

        Servers close kept connections whenever they like, also at the moment one is used again.
        Where a connection is gone before a reply began, the request is sent once more, over a new
        one.

        Args:
            shared: From `lease`.
            body: Of the request.
            headers: Sent with this request.
            params: For the URL.
            anew: Send it over a new connection to begin with.

        Returns:
            Status, headers (found whatever the case of their names), body.

        Raises:
            ApiConnectionError: No connection, or it broke before the reply was complete.
            ApiReplyError: The reply is larger than `max_response_bytes`.
        """
        try:
            if not anew:
                try:
                    return await self._exchange(shared.session, body, headers, params)
                except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError):
                    raise  # not even a new one
                except aiohttp.ClientConnectionError:
                    pass
            return await self._exchange(shared.once, body, headers, params)
        except aiohttp.InvalidURL as error:
            raise ApiReplyError(
                f"{self.url!r} is no valid URL: correct base_url", kind=ApiErrorKind.REFUSED
            ) from error
        except aiohttp.ClientSSLError as error:
            # A certificate that does not fit will not fit at the next attempt.
            raise ApiConnectionError(
                f"no TLS connection to {self.url}: {_text(error)}", retryable=False
            ) from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise ApiConnectionError(f"request to {self.url} failed: {_text(error)}") from error

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        body: bytes,
        headers: dict[str, str] | None,
        params: dict[str, str] | None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        async with session.post(
            self.url,
            data=body,
            headers=headers,
            params=params,
            proxy=self.proxy,
            allow_redirects=False,
        ) as response:
            announced = response.content_length
            if announced is not None and announced > self.max_response_bytes:
                response.close()
                raise self._too_large(f"{announced} bytes")
            chunks: list[bytes] = []
            size = 0
            while chunk := await response.content.readany():
                size += len(chunk)
                if size > self.max_response_bytes:
                    response.close()
                    raise self._too_large(f"more than {self.max_response_bytes} bytes")
                chunks.append(chunk)
            return response.status, response.headers, b"".join(chunks)

    def _open(self) -> _Shared:
        return _Shared(
            session=self._session(force_close=False),
            once=self._session(force_close=True),
            slots=asyncio.Semaphore(self.max_connections),
        )

    def _session(self, *, force_close: bool) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=self.tls, ttl_dns_cache=60, force_close=force_close
            ),
            headers=self.headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    def _too_large(self, found: str) -> ApiReplyError:
        return ApiReplyError(
            f"the reply has {found}, above the limit of {self.max_response_bytes}: raise "
            "max_response_bytes, or ask for less",
            kind=ApiErrorKind.TOO_LARGE,
        )


def proxy_for(url: str) -> str | None:
    """Return the proxy the environment (`HTTPS_PROXY`, `NO_PROXY`, ...) names for a URL.

    Loopback addresses never have one.

    Raises:
        ValueError: It is no http proxy.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(host):
        return None
    if not proxy.startswith(("http://", "https://")):
        raise ValueError(
            f"the environment names the proxy {proxy!r} for {url}, and only http proxies are "
            "supported: set client_kwargs={'trust_env': False}, or NO_PROXY for this host"
        )
    return proxy


def connection_limit() -> int:
    """Return three quarters of the files this process may open, at most 4,096."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return 512
    if soft == resource.RLIM_INFINITY:
        return _MAX_DEFAULT_CONNECTIONS
    return max(1, min(_MAX_DEFAULT_CONNECTIONS, soft * 3 // 4))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
