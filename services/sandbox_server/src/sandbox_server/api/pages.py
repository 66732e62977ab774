"""The pages of a list, and the tokens that say where the next one begins."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from sandbox_server.errors import ApiError

Entry = TypeVar("Entry")


def page_of(
    entries: Sequence[Entry],
    key: Callable[[Entry], tuple[float, str]],
    *,
    token: str | None,
    limit: int | None,
    descending: bool = False,
) -> tuple[list[Entry], dict[str, str]]:
    """Return the entries of one page in their order, and the headers that lead to the next.

    Args:
        entries: All of them.
        key: The time and id of one, which order them.
        token: From the headers of the page before; `None` for the first.
        limit: Entries of a page; `None`: all.
        descending: The newest first.

    Raises:
        ApiError: The token is none of this server (400).
    """
    ordered = sorted(entries, key=key, reverse=descending)
    if token:
        last = _decoded(token)
        ordered = [e for e in ordered if (key(e) < last if descending else key(e) > last)]
    page = ordered[:limit]
    if len(page) == len(ordered):
        return page, {}
    moment, identifier = key(page[-1])
    next_token = base64.urlsafe_b64encode(f"{moment!r}|{identifier}".encode()).decode()
    return page, {"x-next-token": next_token}


def _decoded(token: str) -> tuple[float, str]:
    try:
        text, _, identifier = base64.urlsafe_b64decode(token).decode().partition("|")
        moment = float(text)
        if not math.isfinite(moment):
            raise ValueError(f"{moment} is no time")
    except ValueError as error:
        raise ApiError(400, f"nextToken={token!r} is not a token of this server") from error
    return moment, identifier
