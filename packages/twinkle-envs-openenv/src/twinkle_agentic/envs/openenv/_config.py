"""How a server is reached: its address, and the arguments of `OpenEnvClient` for the connection."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic._aio.net import is_loopback

__all__ = ["CONNECTION_KWARGS", "ConnectionConfig", "ServerAddress", "server_addresses"]

CONNECTION_KWARGS = {
    "headers": "headers",
    "max_message_size_mb": "max_message_bytes",
    "websocket_ping_interval_s": "ping_interval_s",
    "websocket_ping_timeout_s": "ping_timeout_s",
}
"""Arguments of OpenEnv's client constructor that hold for our own connection, and our names."""

_SCHEMES = {"http": ("ws", "http"), "ws": ("ws", "http"), "https": ("wss", "https")}
_SCHEMES["wss"] = _SCHEMES["https"]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The two URLs of a server.

    Attributes:
        websocket_url: Of the session endpoint, `.../ws`.
        http_url: Base of the HTTP endpoints, without a trailing slash.
        is_loopback: Whether the host is this machine; then no proxy of the environment is used.
    """

    websocket_url: str
    http_url: str
    is_loopback: bool

    @classmethod
    def parse(cls, base_url: str) -> ServerAddress:
        """Read a base URL.

        Args:
            base_url: `http(s)://` or `ws(s)://`, with or without a path prefix, a trailing slash or
                `/ws`.

        Raises:
            ValueError: It has another scheme, no host, or an impossible port.
        """
        example = "expected one such as 'http://10.0.0.5:8000'"
        try:
            parts = urlsplit(base_url.strip())
            _ = parts.port  # raises on a port that is no number below 65536
        except ValueError as error:
            raise ValueError(
                f"base_url is no server address, found {base_url!r} ({error}): {example}"
            ) from None
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise ValueError(f"base_url is no http(s) or ws(s) URL, found {base_url!r}: {example}")
        path = parts.path.rstrip("/").removesuffix("/ws").rstrip("/")
        websocket, http = _SCHEMES[parts.scheme]
        return cls(
            websocket_url=urlunsplit((websocket, parts.netloc, f"{path}/ws", parts.query, "")),
            http_url=urlunsplit((http, parts.netloc, path, "", "")),
            is_loopback=is_loopback(parts.hostname),
        )


def server_addresses(base_url: str | Sequence[str] | None) -> list[ServerAddress]:
    """Return the servers that `base_url`, or else `$OPENENV_BASE_URL`, names, each once.

    Raises:
        ValueError: There is none, or one is no address.
    """
    if base_url is None:
        base_url = os.environ.get("OPENENV_BASE_URL", "").split(",")
    urls = [base_url] if isinstance(base_url, str) else list(base_url)
    addresses = [ServerAddress.parse(url) for url in urls if url.strip()]
    if not addresses:
        raise ValueError(
            "base_url is missing: pass it or set OPENENV_BASE_URL, for example "
            "'http://10.0.0.5:8000'"
        )
    return list(dict.fromkeys(addresses))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """The limits and headers of a client's connection; `OpenEnvClient` says what each means."""

    connect_timeout_s: float
    message_timeout_s: float
    capacity_timeout_s: float
    close_timeout_s: float
    ping_interval_s: float | None
    ping_timeout_s: float | None
    max_message_bytes: int
    headers: Mapping[str, str] | None
    proxy: str | bool | None

    @classmethod
    def of(
        cls, *, token: str | None, client_kwargs: Mapping[str, Any], **fields: Any
    ) -> ConnectionConfig:
        """Check the limits, after applying what `client_kwargs` says in OpenEnv's words.

        Raises:
            ValueError: A limit is out of range.
        """
        for theirs, own in CONNECTION_KWARGS.items():
            if theirs in client_kwargs and not (own == "headers" and fields["headers"]):
                fields[own] = client_kwargs[theirs]
                if theirs == "max_message_size_mb":
                    fields[own] = int(fields[own] * 2**20)
        if fields["ping_timeout_s"] is None:
            fields["ping_timeout_s"] = fields["message_timeout_s"]
        headers = dict(fields.pop("headers") or {})
        token = token or os.environ.get("OPENENV_TOKEN")
        if token is not None and "authorization" not in {name.lower() for name in headers}:
            headers["Authorization"] = f"Bearer {token}"
        for name, value in fields.items():
            if name.endswith("_s"):
                check_limit(
                    name,
                    value,
                    allow_none=name.startswith("ping_"),
                    allow_zero=name == "capacity_timeout_s",
                )
        check_count("max_message_bytes", fields["max_message_bytes"])
        return cls(headers=headers, **fields)

    def proxy_for(self, address: ServerAddress) -> str | bool | None:
        """Return the proxy to use: a URL, `True` for that of the environment, `None` for none."""
        if self.proxy is False or (self.proxy is True and address.is_loopback):
            return None
        return self.proxy
