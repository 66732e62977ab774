"""The ASGI application: OpenEnv's protocol, with admission, metrics and an end for every session.

`/ws` is one session per connection. `POST /reset`, `POST /step` and `GET /state` each use a new
environment and forget it, as OpenEnv's server does. `/health`, `/capacity`, `/metrics`, `/schema`
and `/metadata` tell about the server. `/mcp` is in `_mcp.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from openenv_server import _metrics
from openenv_server._access import AccessGuard
from openenv_server._admission import Admission, RefusedError, SessionPermit
from openenv_server._mcp import HttpSessions, answer_rpc
from openenv_server._messages import (
    error_message,
    field_errors,
    mapping,
    message,
    observation_data,
    parse_action,
)
from openenv_server._session import EnvRaisedError, EnvSession, ResetArgumentError, uncancelled

__all__ = ["Served", "class_of", "make_asgi"]

logger = logging.getLogger(__name__)

_MAX_PENDING = 8  # messages of one client that are read before the first is answered


class Served:
    """What is served, and the rules for it.

    Args:
        env: Makes the environment of one session; may be asynchronous.
        action_cls: Type of its actions.
        observation_cls: Type of its observations.
        state_cls: Type of its state.
        name: Name for the logs and the schema.
        admission: Who is let in.
        idle_timeout_s: Seconds without a request after which a session ends; 0 is no limit.
    """

    def __init__(
        self,
        env: Callable[[], Any],
        action_cls: type[Any],
        observation_cls: type[Any],
        state_cls: type[Any],
        *,
        name: str,
        admission: Admission,
        idle_timeout_s: float = 0.0,
    ) -> None:
        self.env = env
        self.action_cls = action_cls
        self.observation_cls = observation_cls
        self.state_cls = state_cls
        self.name = name
        self.admission = admission
        self.idle_timeout_s = idle_timeout_s or None
        self.env_cls = class_of(env)
        one_thread = getattr(self.env_cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False)
        self._threads = ThreadPoolExecutor(1) if one_thread else None
        self.http_sessions = HttpSessions()

    async def admit(self, connection: HTTPConnection) -> SessionPermit:
        """Wait for a slot.

        Raises:
            RefusedError: There is none.
        """
        client, wait_s = _client_of(connection)
        started = time.monotonic()
        try:
            permit = await self.admission.enter(client, wait_s=wait_s)
        except RefusedError as error:
            _metrics.REFUSED.labels(error.reason).inc()
            logger.warning("refused client=%s: %s", client, error)
            raise
        _metrics.STARTED.inc()
        _metrics.QUEUE_SECONDS.observe(time.monotonic() - started)
        return permit

    async def open(self) -> EnvSession:
        """Make an environment."""
        return await EnvSession.open(self.env, threads=self._threads)

    async def reset(self, session: EnvSession, data: Any) -> dict[str, Any]:
        """Start an episode and return the `data` of the answer."""
        return await self._measured("reset", session.reset(mapping(data)))

    async def step(self, session: EnvSession, data: Any) -> dict[str, Any]:
        """Take a step and return the `data` of the answer."""
        action = parse_action(data, self.action_cls)
        return await self._measured("step", session.step(action))

    async def _measured(self, request: str, call: Any) -> dict[str, Any]:
        started = time.monotonic()
        outcome = "error"
        try:
            data = observation_data(await call)
            metadata = mapping(data.get("metadata"))
            outcome = _failure(metadata)
            # The step after a lost interpreter says so too, and has killed nothing.
            if metadata.get("state") == "lost" and "failure" in metadata:
                _metrics.KILLS.labels(outcome).inc()
            return data
        except asyncio.CancelledError:
            outcome = "client_gone"
            _metrics.KILLS.labels(outcome).inc()
            raise
        finally:
            _metrics.REQUESTS.labels(request, outcome).observe(time.monotonic() - started)

    @contextlib.asynccontextmanager
    async def once(self, request: Request) -> AsyncGenerator[EnvSession]:
        """Use an environment for one HTTP request."""
        permit = await self.admit(request)
        try:
            session = await uncancelled(self.open())
            try:
                yield session
            finally:
                await uncancelled(session.close())
        finally:
            permit.release()


def make_asgi(
    served: Served,
    *,
    tokens: tuple[str, ...] = (),
    allowed_hosts: tuple[str, ...] = (),
    only_loopback: bool = False,
    lifespan: Callable[[], contextlib.AbstractAsyncContextManager[Any]] | None = None,
) -> Starlette:
    """Make the application; the arguments are those of `AccessGuard` and, at last, its lifespan."""

    @contextlib.asynccontextmanager
    async def alive(_: Starlette) -> AsyncGenerator[None]:
        async with lifespan() if lifespan is not None else contextlib.nullcontext():
            try:
                yield
            finally:
                await served.http_sessions.close()

    async def health(_: Request) -> Response:
        status = await served.admission.status()
        if status.draining:
            return JSONResponse({"status": "unhealthy", "draining": True}, status_code=503)
        return JSONResponse({"status": "healthy"})

    async def capacity(_: Request) -> Response:
        status = await served.admission.status()
        return JSONResponse(
            {
                "sessions": status.sessions,
                "limit": status.limit,
                "free": status.free,
                "queue": status.queue,
                "max_queue": status.max_queue,
                "draining": status.draining,
            }
        )

    async def metrics(_: Request) -> Response:
        text = _metrics.render(await served.admission.status())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def schema(_: Request) -> Response:
        classes = {
            "action": served.action_cls,
            "observation": served.observation_cls,
            "state": served.state_cls,
        }
        return JSONResponse({name: cls.model_json_schema() for name, cls in classes.items()})

    async def metadata(_: Request) -> Response:
        return JSONResponse(await _describe(served))

    async def reset(request: Request) -> Response:
        arguments = await _body(request)
        async with served.once(request) as session:
            return _json(await served.reset(session, arguments))

    async def step(request: Request) -> Response:
        body = await _body(request)
        async with served.once(request) as session:
            return _json(await served.step(session, body.get("action")))

    async def state(request: Request) -> Response:
        async with served.once(request) as session:
            return _json(await session.state())

    async def mcp(request: Request) -> Response:
        return _json(await served.http_sessions.answer(served, request))

    async def websocket(ws: WebSocket) -> None:
        await _Conversation(served, ws).run()

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/capacity", capacity),
            Route("/metrics", metrics),
            Route("/schema", schema),
            Route("/metadata", metadata),
            Route("/reset", reset, methods=["POST"]),
            Route("/step", step, methods=["POST"]),
            Route("/state", state),
            Route("/mcp", mcp, methods=["POST"]),
            WebSocketRoute("/ws", websocket),
        ],
        middleware=[
            Middleware(
                AccessGuard,
                tokens=tokens,
                allowed_hosts=allowed_hosts,
                only_loopback=only_loopback,
            )
        ],
        exception_handlers={
            RefusedError: _answer(503, "CAPACITY_REACHED"),
            ValidationError: _answer(422, "VALIDATION_ERROR"),
            ResetArgumentError: _answer(422, "VALIDATION_ERROR"),
            json.JSONDecodeError: _answer(422, "INVALID_JSON"),
            EnvRaisedError: _answer(500, "EXECUTION_ERROR"),
        },
        lifespan=alive,
    )


def class_of(env: Any) -> Any:
    """Return what makes the environments: their class, unless it is a function."""
    return env.func if isinstance(env, partial) else env


class _Conversation:
    """One websocket: read always, so that pings are answered and a client that goes is seen."""

    def __init__(self, served: Served, ws: WebSocket) -> None:
        self._served = served
        self._ws = ws
        self._inbox: asyncio.Queue[str] = asyncio.Queue(_MAX_PENDING)
        self._id = uuid.uuid4().hex[:12]

    async def run(self) -> None:
        await self._ws.accept()
        talking = asyncio.create_task(self._talk())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([talking, reading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            talking.cancel()
            await asyncio.wait([talking, reading])
        if not talking.cancelled() and (error := talking.exception()) is not None:
            logger.error("session=%s failed", self._id, exc_info=error)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # closed already
            await self._ws.close()

    async def _read(self) -> None:
        while True:
            received = await self._ws.receive()
            if received["type"] == "websocket.disconnect":
                return
            text = received.get("text")
            await self._inbox.put(
                received["bytes"].decode(errors="replace") if text is None else text
            )

    async def _talk(self) -> None:
        served = self._served
        attached = self._ws.query_params.get("session_id")
        if attached is not None:
            async with served.http_sessions.attached(attached) as session:
                if session is None:
                    text = f"there is no free session {attached!r}"
                    await self._send(error_message("SESSION_ERROR", text))
                else:
                    await self._serve(session)
            return
        try:
            permit = await served.admit(self._ws)
        except RefusedError as error:
            status = error.status
            await self._send(
                error_message(
                    "CAPACITY_REACHED",
                    str(error),
                    reason=error.reason,
                    active_sessions=status.sessions,
                    max_sessions=status.limit,
                    queue=status.queue,
                )
            )
            return
        try:
            session = await self._open()
            if session is None:
                return
            client = self._ws.client.host if self._ws.client else "?"
            logger.info("session=%s opened for client=%s", self._id, client)
            started, why = time.monotonic(), "the client went away"
            try:
                why = await self._serve(session)
            finally:
                await uncancelled(session.close())
                logger.info(
                    "session=%s closed after %d steps and %.1f s: %s",
                    self._id,
                    session.steps,
                    time.monotonic() - started,
                    why,
                )
        finally:
            permit.release()

    async def _open(self) -> EnvSession | None:
        opening = asyncio.ensure_future(self._served.open())
        try:
            return await uncancelled(opening)
        except asyncio.CancelledError:
            if opening.exception() is None:
                await uncancelled(opening.result().close())
            raise
        except EnvRaisedError as error:
            logger.error("session=%s could not be opened", self._id, exc_info=error.__cause__)
            name = getattr(self._served.env_cls, "__name__", self._served.name)
            await self._send(error_message("FACTORY_ERROR", str(error), factory_name=name))
            return None

    async def _serve(self, session: EnvSession) -> str:
        while True:
            try:
                async with asyncio.timeout(self._served.idle_timeout_s):
                    text = await self._inbox.get()
            except TimeoutError:
                why = f"no request for {self._served.idle_timeout_s:g} s (--idle-timeout-s)"
                await self._send(error_message("SESSION_ERROR", f"the session was closed: {why}"))
                return why
            answer = await self._answer(session, text)
            if answer is None:
                return "the client closed it"
            await self._send(answer)

    async def _answer(self, session: EnvSession, text: str) -> str | None:
        try:
            asked: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            return error_message("INVALID_JSON", f"Invalid JSON: {error}")
        kind, data = mapping(asked).get("type"), mapping(asked).get("data")
        try:
            match kind:
                case "reset":
                    return message("observation", await self._served.reset(session, data))
                case "step":
                    return message("observation", await self._served.step(session, data))
                case "state":
                    return message("state", await session.state())
                case "mcp":
                    return message("mcp", await answer_rpc(self._served, session, data))
                case "close":
                    return None
                case _:
                    return error_message("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        except ValidationError as error:
            return error_message("VALIDATION_ERROR", _explain(error), errors=field_errors(error))
        except ResetArgumentError as error:
            return error_message("VALIDATION_ERROR", str(error), errors=[])
        except EnvRaisedError as error:
            logger.info("session=%s: the environment raised: %s", self._id, error)
            return error_message("EXECUTION_ERROR", str(error))
        except Exception as error:  # such as an observation that is no JSON
            logger.exception("session=%s: the answer to %s cannot be made", self._id, kind)
            return error_message("EXECUTION_ERROR", f"{type(error).__name__}: {error}")

    async def _send(self, text: str) -> None:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the reader has seen it
            await self._ws.send_text(text)


def _client_of(connection: HTTPConnection) -> tuple[str, float | None]:
    """Return whose share of the slots a connection takes, and how long it wants to wait."""
    said = connection.headers.get("x-openenv-client")
    host = connection.client.host if connection.client else "?"
    wait_s = None
    with contextlib.suppress(ValueError):
        wait_s = max(0.0, float(connection.headers.get("x-openenv-queue-timeout-s", "")))
    if said:
        return f"name {said[:100]}", wait_s
    return f"{connection.scope.get('token_number', '')}@{host}", wait_s


def _failure(metadata: dict[str, Any]) -> str:
    failure = metadata.get("failure")
    if failure is None:
        return "ok"
    # What an environment of somebody else puts there must not become a metric per text.
    return str(failure) if str(failure).isidentifier() else "failed"


async def _describe(served: Served) -> dict[str, Any]:
    cls = served.env_cls
    own = getattr(cls, "get_metadata", None)
    if own is not None and own.__module__ != "openenv.core.env_server.interfaces":
        session = await uncancelled(served.open())
        try:
            return session.env.get_metadata().model_dump()
        finally:
            await uncancelled(session.close())
    name = getattr(cls, "__name__", served.name)
    return {"name": name, "description": f"{name} environment", "version": "1.0.0"}


async def _body(request: Request) -> dict[str, Any]:
    text = await request.body()
    return mapping(json.loads(text)) if text else {}


def _json(data: Any) -> Response:
    return Response(to_json(data, inf_nan_mode="constants"), media_type="application/json")


def _explain(error: ValidationError) -> str:
    parts = [
        f"{'.'.join(map(str, each['loc'])) or 'data'}: {each['msg']}" for each in error.errors()
    ]
    return "Invalid message: " + "; ".join(parts[:5])


def _answer(status: int, code: str) -> Callable[[Request, Exception], Response]:
    def answer(_: Request, error: Exception) -> Response:
        detail = _explain(error) if isinstance(error, ValidationError) else str(error)
        return JSONResponse({"detail": detail, "code": code}, status_code=status)

    return answer
