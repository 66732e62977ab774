"""The ASGI application: one origin, control API and sandboxes told apart by a header."""

from __future__ import annotations

import re
from collections import Counter

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api import serve_control
from sandbox_server.auth import check_sandbox_access, is_loopback
from sandbox_server.config import ENVD_PORT, INTERPRETER_PORT, ServerConfig
from sandbox_server.envd.routes import serve_envd
from sandbox_server.errors import ApiError, as_api_error
from sandbox_server.http import JsonResponse, error_response
from sandbox_server.interpreter.routes import serve_interpreter
from sandbox_server.metrics import Metrics
from sandbox_server.registry import Registry

_ID_HEADERS = ("e2b-sandbox-id", "x-agentenv-sandbox-id")
_PORT_HEADERS = ("e2b-sandbox-port", "x-agentenv-sandbox-port")
_HOST = re.compile(
    r"(?P<port>[0-9]{1,5})-(?P<id>[a-z0-9]{20})\.(?P<domain>[^:/]+)(:[0-9]{1,5})?", re.IGNORECASE
)
_DECISIVE = frozenset(
    {
        *(*_ID_HEADERS, *_PORT_HEADERS, "host", "authorization"),
        *("x-api-key", "x-access-token", "e2b-traffic-access-token"),
    }
)


def create_app(config: ServerConfig) -> SandboxApp:
    """Return the application of one server; its lifespan starts and ends the sandboxes."""
    return SandboxApp(config)


class SandboxApp:
    """An ASGI application. Run it with one worker process on the plain asyncio loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.metrics = Metrics()
        self.registry = Registry(config, self.metrics)
        self.metrics.watch(
            lambda state: sum(r.state == state for r in self.registry.records.values())
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            scope["app"] = self
            await self._http(Request(scope, receive), send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, request: Request, send: Send) -> None:
        lost_status = 404
        try:
            sandbox_id, port = _destination(request, self.config.domain)
            if sandbox_id is not None:
                lost_status = 502
                self.metrics.requests.labels("sandbox").inc()
                await self._sandbox(sandbox_id, port, request, send)
                return
            self.metrics.requests.labels("control").inc()
            response = await self._control(request)
        except Exception as error:
            response = error_response(as_api_error(error, lost_status=lost_status))
        await response(request.scope, request.receive, send)

    async def _control(self, request: Request) -> Response:
        what = (request.method, request.scope["path"])
        if what == ("GET", "/health"):
            return JsonResponse({"status": "ok", "isolation": self.registry.isolation})
        if what == ("GET", "/metrics"):
            return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")
        return await serve_control(request)

    async def _sandbox(self, sandbox_id: str, port: str, request: Request, send: Send) -> None:
        if port not in (str(ENVD_PORT), str(INTERPRETER_PORT)):
            raise ApiError(
                502,
                f"port {port!r} of the sandbox is not open: this server forwards {ENVD_PORT} "
                f"and {INTERPRETER_PORT}",
            )
        interpreter = port == str(INTERPRETER_PORT)
        record = self.registry.get(sandbox_id, status=502)
        check_sandbox_access(record, request, interpreter=interpreter)
        await self.registry.make_reachable(record)
        await (serve_interpreter if interpreter else serve_envd)(record, request, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.registry.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.registry.close()
        await send({"type": "lifespan.shutdown.complete"})


def _destination(request: Request, domain: str) -> tuple[str | None, str]:
    """Return the sandbox and port that a request is for; no sandbox: the control API.

    Raises:
        ApiError: A header that decides something is there twice (400).
    """
    headers = request.headers
    for name, count in Counter(headers.keys()).items():
        if count > 1 and name in _DECISIVE:
            raise ApiError(400, f"the header {name!r} is there more than once")
    sandbox_id = next((headers[name] for name in _ID_HEADERS if name in headers), None)
    if sandbox_id is not None:
        return sandbox_id, next((headers[n] for n in _PORT_HEADERS if n in headers), str(ENVD_PORT))
    match = _HOST.fullmatch(headers.get("host", ""))
    if match is None or not (match["domain"] == domain or is_loopback(match["domain"])):
        return None, ""  # without a domain of its own, no name is this server's but loopback
    return match["id"], match["port"]
