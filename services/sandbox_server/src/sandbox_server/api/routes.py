"""How the routes of the control API are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


def route(method: str, path: str, handler: Handler) -> Route:
    """Return the route of one method on one path."""
    made = Route(path, handler)
    made.methods = {method}  # starlette would add HEAD to GET
    return made


def both(method: str, path: str, handler: Handler) -> list[Route]:
    """Return the routes of what is the same in both versions of the API."""
    return [route(method, path, handler), route(method, f"/v2{path}", handler)]
