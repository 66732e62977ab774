"""The beginning and the end of a connection: opening one, and what its failures mean in words."""

from __future__ import annotations

from typing import cast

from websockets.asyncio.client import connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)

from twinkle_agentic.envs.errors import CapacityError, EnvTimeoutError, SessionClosedError
from twinkle_agentic.envs.openenv.link_settings import LinkSettings
from twinkle_agentic.envs.openenv.wire import Wire

__all__ = ["closed_error", "open_wire"]

_TOKEN_WANTED = 401
_CLOSED_FOR_ROOM = (429, 503)  # what a load balancer in front of full servers answers


async def open_wire(settings: LinkSettings) -> Wire:
    """Connect.

    Raises:
        EnvTimeoutError: No handshake within `connect_timeout_s`.
        CapacityError: The handshake was answered with HTTP 429 or 503.
        SessionClosedError: The server cannot be reached, or is no OpenEnv server.
    """
    address = settings.address
    proxy = settings.proxy
    if proxy is False or (proxy is True and address.is_loopback):
        proxy = None
    try:
        wire = await connect(
            address.websocket_url,
            open_timeout=settings.connect_timeout_s,
            close_timeout=settings.close_timeout_s,
            ping_interval=settings.ping_interval_s,
            ping_timeout=settings.ping_timeout_s,
            max_size=settings.max_message_bytes,
            additional_headers=settings.headers,
            proxy=proxy,
            compression=None,
            create_connection=Wire,
        )
    except TimeoutError:
        raise EnvTimeoutError(
            f"no websocket handshake from {address.websocket_url} within "
            f"connect_timeout_s={settings.connect_timeout_s:g}: the server is overloaded or "
            "not there"
        ) from None
    except InvalidStatus as error:
        status = error.response.status_code
        kind = CapacityError if status in _CLOSED_FOR_ROOM else SessionClosedError
        what_to_do = (
            "give the server's token, OpenEnvClient(token=...) or OPENENV_TOKEN"
            if status == _TOKEN_WANTED
            else "check that base_url is an OpenEnv server and that a proxy in between passes "
            "websockets"
        )
        raise kind(
            f"{address.websocket_url} answered the websocket handshake with HTTP {status}: "
            f"{what_to_do}"
        ) from error
    except (OSError, InvalidHandshake, InvalidURI, ImportError) as error:
        raise SessionClosedError(
            f"cannot connect to {address.websocket_url}: {error or type(error).__name__}: "
            "is the server running there?"
        ) from error
    return cast("Wire", wire)


def closed_error(error: ConnectionClosed, settings: LinkSettings) -> SessionClosedError:
    """Say in words why a connection ended, and which limit of the settings it met."""
    got, sent = error.rcvd, error.sent
    if sent is not None and sent.code == 1009 and not error.rcvd_then_sent:
        return SessionClosedError(
            f"the server's answer is larger than max_message_bytes={settings.max_message_bytes}: "
            "the session was closed; raise max_message_bytes or make the environment say less"
        )
    if got is not None and got.code == 1009:
        return SessionClosedError(
            "the server closed the session because the message was too large for it "
            f"({got.reason or 'code 1009'}): raise uvicorn's ws_max_size, or lower "
            "max_action_bytes to be told before sending"
        )
    if sent is not None and sent.code == 1011 and not error.rcvd_then_sent:
        return SessionClosedError(
            f"the server answered no keepalive ping for ping_timeout_s={settings.ping_timeout_s}: "
            "it is dead or blocked, and the session was closed"
        )
    if got is None:
        return SessionClosedError(
            "the connection to the server broke without a close frame: the server died or the "
            "network failed"
        )
    reason = f" ({got.reason})" if got.reason else ""
    exits = "; an environment that calls sys.exit ends its session this way"
    hint = exits if got.code == 1000 else ""
    return SessionClosedError(f"the server closed the session with code {got.code}{reason}{hint}")
