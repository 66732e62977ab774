"""The tokens of pages: where the next page of a list begins."""

from __future__ import annotations

import base64
import math

from sandbox_server.errors import ApiError

__all__ = ["decode_token", "encode_token"]


def encode_token(moment: float, identifier: str) -> str:
    """Return the token of the page that begins behind an entry, by its time and id."""
    return base64.urlsafe_b64encode(f"{moment!r}|{identifier}".encode()).decode()


def decode_token(token: str) -> tuple[float, str]:
    """Return the time and id of the entry that a page begins behind.

    Raises:
        ApiError: It is no token of this server (400).
    """
    try:
        text, _, identifier = base64.urlsafe_b64decode(token).decode().partition("|")
        moment = float(text)
    except ValueError as error:
        raise ApiError(400, f"nextToken={token!r} is not a token of this server") from error
    if not math.isfinite(moment):
        raise ApiError(400, f"nextToken={token!r} is not a token of this server")
    return moment, identifier
