"""The routes of the control plane: which function answers which requests."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandbox_server.http import Request, Response
from sandbox_server.registry import Registry

__all__ = ["Route", "route"]

Handler = Callable[[Registry, Request, "re.Match[str]"], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One method on one family of paths."""

    method: str
    pattern: re.Pattern[str]
    handler: Handler


def route(method: str, pattern: str, handler: Handler) -> Route:
    """Make a route from the text of its pattern, which matches whole paths."""
    return Route(method, re.compile(pattern), handler)
