"""The control API: sandboxes, templates, snapshots."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from sandbox_server.api import sandboxes, templates
from sandbox_server.auth import check_control_access
from sandbox_server.errors import ApiError

__all__ = ["serve_control"]


async def serve_control(request: Request) -> Response:
    """Answer one request of the control API.

    Raises:
        Exception: What the answer is then made from.
    """
    check_control_access(request, request.app.config.api_key)
    allowed: set[str] = set()
    for route in (*sandboxes.ROUTES, *templates.ROUTES):
        match, child = route.matches(request.scope)
        if match is Match.FULL:
            request.scope.update(child)
            return await route.endpoint(request)
        if match is Match.PARTIAL:
            allowed |= route.methods or set()
    what = f"{request.method} {request.scope['path']}"
    if allowed:
        raise ApiError(405, f"{what}: use {' or '.join(sorted(allowed))}")
    raise ApiError(404, f"route not found: {what}")
