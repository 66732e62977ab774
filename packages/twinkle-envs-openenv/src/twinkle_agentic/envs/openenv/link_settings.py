"""How a server is reached: the arguments of `OpenEnvClient` that say so, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic.envs.openenv.address import ServerAddress

__all__ = ["HEEDED", "LinkSettings", "link_settings"]

HEEDED = frozenset(
    {
        "headers",
        "max_message_size_mb",
        "websocket_ping_interval_s",
        "websocket_ping_timeout_s",
    }
)
"""Arguments of OpenEnv's client constructor that count for our own connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How to reach a server, and what to bear with.

    Attributes:
        address: The server.
        connect_timeout_s: Seconds for TCP, TLS and the websocket handshake together.
        close_timeout_s: Seconds for a polite close; then the connection is cut.
        ping_interval_s: Seconds between keepalive pings; `None` sends none.
        ping_timeout_s: Seconds without a pong after which the server counts as dead; `None` waits
            for ever.
        max_message_bytes: Largest frame taken from the server.
        headers: Extra HTTP headers of the handshake.
        proxy: `True` asks the environment (`HTTP_PROXY` and the like) unless the server is on this
            machine, `None` goes straight, a URL goes through that proxy.
    """

    address: ServerAddress
    connect_timeout_s: float = 10.0
    close_timeout_s: float = 5.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 120.0
    max_message_bytes: int = 100 * 2**20
    headers: Mapping[str, str] | None = None
    proxy: str | bool | None = True


def link_settings(
    *,
    address: ServerAddress,
    connect_timeout_s: float,
    message_timeout_s: float,
    capacity_timeout_s: float,
    close_timeout_s: float,
    ping_interval_s: float | None,
    ping_timeout_s: float | None,
    max_message_bytes: int,
    headers: Mapping[str, str] | None,
    token: str | None = None,
    proxy: str | bool | None,
    client_kwargs: Mapping[str, Any],
) -> LinkSettings:
    """Check the limits, and heed what `client_kwargs` says in OpenEnv's words.

    Raises:
        ValueError: A limit is out of range.
    """
    if "max_message_size_mb" in client_kwargs:
        max_message_bytes = int(client_kwargs["max_message_size_mb"] * 2**20)
    if "websocket_ping_interval_s" in client_kwargs:
        ping_interval_s = client_kwargs["websocket_ping_interval_s"]
    if "websocket_ping_timeout_s" in client_kwargs:
        ping_timeout_s = client_kwargs["websocket_ping_timeout_s"]
    headers = headers or client_kwargs.get("headers")
    if token is not None and "authorization" not in {name.lower() for name in headers or {}}:
        headers = {**(headers or {}), "Authorization": f"Bearer {token}"}
    above_zero = {
        "connect_timeout_s": connect_timeout_s,
        "message_timeout_s": message_timeout_s,
        "close_timeout_s": close_timeout_s,
        "ping_interval_s": ping_interval_s,
        "ping_timeout_s": ping_timeout_s,
    }
    for name, value in above_zero.items():
        check_limit(name, value, allow_none=name.startswith("ping_"))
    check_limit("capacity_timeout_s", capacity_timeout_s, allow_zero=True)
    check_count("max_message_bytes", max_message_bytes)
    return LinkSettings(
        address=address,
        connect_timeout_s=connect_timeout_s,
        close_timeout_s=close_timeout_s,
        ping_interval_s=ping_interval_s,
        ping_timeout_s=message_timeout_s if ping_timeout_s is None else ping_timeout_s,
        max_message_bytes=int(max_message_bytes),
        headers=None if headers is None else dict(headers),
        proxy=proxy,
    )
