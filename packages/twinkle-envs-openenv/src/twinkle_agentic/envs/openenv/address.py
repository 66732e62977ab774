"""Where a server is: one base URL, read once."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from twinkle_agentic._aio.net import is_loopback

__all__ = ["ServerAddress"]

_SCHEMES = {"http": ("ws", "http"), "ws": ("ws", "http"), "https": ("wss", "https")}
_SCHEMES["wss"] = _SCHEMES["https"]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The two faces of a server.

    Attributes:
        websocket_url: Of the session endpoint, `.../ws`.
        http_url: Base of the HTTP endpoints, without a trailing slash.
        is_loopback: Whether the host is this machine; then no proxy is asked.
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
