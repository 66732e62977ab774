"""MCP over the session's websocket, and over `POST /mcp` with sessions that HTTP requests name.

Sessions opened by `openenv/session/create` live in one process: serve them with one worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from openenv_server._admission import RefusedError, SessionPermit
from openenv_server._messages import mapping
from openenv_server._session import EnvRaisedError, EnvSession, uncancelled

if TYPE_CHECKING:
    from starlette.requests import Request

    from openenv_server.serving import Served

__all__ = ["HttpSessions", "answer_rpc"]

_MCP_MODULE = "openenv.core.env_server.mcp_types"
_UNUSED_S = 600.0  # then a session that no websocket and no request uses is closed
_PARSE, _INVALID, _NO_METHOD, _PARAMS, _INTERNAL, _SERVER = (
    -32700,
    -32600,
    -32601,
    -32602,
    -32603,
    -32000,
)


class _RpcError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


async def answer_rpc(served: Served, session: EnvSession, request: Any) -> dict[str, Any]:
    """Answer one JSON-RPC request from the session's environment."""
    number: Any = None
    try:
        method, params, number = _parse(request)
        return _result(number, await _call(served, session, method, params))
    except _RpcError as error:
        return _error(number, error.code, str(error))
    except Exception as error:
        return _error(number, _INTERNAL, str(error) or type(error).__name__)


async def _call(served: Served, session: EnvSession, method: str, params: dict[str, Any]) -> Any:
    env = session.env
    client, server = getattr(env, "mcp_client", None), getattr(env, "mcp_server", None)
    if method == "tools/list":
        if client:
            return {"tools": _plain(await client.list_tools())}
        if server:
            return {"tools": [_described(tool) for tool in _tools_of(server).values()]}
        observation = await _step(served, session, "ListToolsAction", {})
        return {"tools": _plain(observation.tools)}
    if method != "tools/call":
        raise _RpcError(_NO_METHOD, f"Method not found: {method}")
    name, arguments = params.get("name"), mapping(params.get("arguments"))
    if not name:
        raise _RpcError(_PARAMS, "Invalid params - 'name' is required")
    session.steps += 1
    if client:
        return _plain(await client.call_tool(name=name, arguments=arguments))
    if server:
        tools = _tools_of(server)
        if name not in tools:
            raise _RpcError(_PARAMS, f"Tool not found: {name}")
        made: Any = tools[name].fn(**arguments)
        return _plain(await made if inspect.isawaitable(made) else made)
    fields = {"tool_name": name, "arguments": arguments}
    return _plain(await _step(served, session, "CallToolAction", fields))


async def _step(served: Served, session: EnvSession, action: str, fields: dict[str, Any]) -> Any:
    if served.action_cls.__module__ != _MCP_MODULE:
        raise _RpcError(_INTERNAL, "Environment does not support MCP")
    cls: Any = getattr(importlib.import_module(_MCP_MODULE), action)
    return await session.step(cls(**fields))


class HttpSessions:
    """The sessions of `openenv/session/create`, which OpenEnv's `MCPToolClient` uses."""

    def __init__(self) -> None:
        self._open: dict[str, _HttpSession] = {}

    async def answer(self, served: Served, http: Request) -> dict[str, Any]:
        """Answer a request of `POST /mcp`."""
        try:
            request: Any = json.loads(await http.body())
        except ValueError:
            return _error(None, _PARSE, "Parse error")
        number: Any = None
        try:
            method, params, number = _parse(request)
            if method == "openenv/session/create":
                return _result(number, {"session_id": await self._create(served, http)})
            if method == "openenv/session/close":
                return _result(number, await self._close(params.get("session_id")))
        except (_RpcError, RefusedError, EnvRaisedError) as error:
            return _error(number, getattr(error, "code", _SERVER), str(error))
        named = params.get("session_id")
        if not named:
            async with served.once(http) as session:
                return await answer_rpc(served, session, request)
        if named not in self._open:
            return _error(number, _PARAMS, f"Unknown session_id: {named}")
        held = self._open[named]
        held.busy += 1
        try:
            return await answer_rpc(served, held.session, request)
        finally:
            held.busy -= 1
            self._watch(named, held)

    @contextlib.asynccontextmanager
    async def attached(self, session_id: str) -> AsyncGenerator[EnvSession | None]:
        """Use a session over a websocket; None where there is none, or it has a websocket."""
        held = self._open.get(session_id)
        if held is None or held.attached:
            yield None
            return
        held.attached = True
        held.busy += 1
        try:
            yield held.session
        finally:
            held.attached = False
            held.busy -= 1
            if held.closing:
                await uncancelled(self._end(session_id))
            else:
                self._watch(session_id, held)

    async def close(self) -> None:
        """End all."""
        for session_id in list(self._open):
            await self._end(session_id)

    async def _create(self, served: Served, http: Request) -> str:
        permit = await served.admit(http)
        try:
            session = await uncancelled(served.open())
        except BaseException:
            permit.release()
            raise
        session_id = str(uuid.uuid4())
        held = self._open[session_id] = _HttpSession(session, permit)
        self._watch(session_id, held)
        return session_id

    async def _close(self, session_id: Any) -> dict[str, Any]:
        if session_id not in self._open:
            raise _RpcError(_PARAMS, f"Unknown session_id: {session_id}")
        held = self._open[session_id]
        if held.attached:
            held.closing = True
            return {"session_id": session_id, "closed": False, "closing": True}
        await uncancelled(self._end(session_id))
        return {"session_id": session_id, "closed": True}

    def _watch(self, session_id: str, held: _HttpSession) -> None:
        """Close it when it has not been used for long: no connection says that its client went."""
        if held.timer is not None:
            held.timer.cancel()
        loop = asyncio.get_running_loop()

        def end() -> None:
            if not held.busy:
                held.ending = loop.create_task(self._end(session_id))

        held.timer = loop.call_later(_UNUSED_S, end)

    async def _end(self, session_id: str) -> None:
        held = self._open.pop(session_id, None)
        if held is None:
            return
        if held.timer is not None:
            held.timer.cancel()
        try:
            await held.session.close()
        finally:
            held.permit.release()


class _HttpSession:
    def __init__(self, session: EnvSession, permit: SessionPermit) -> None:
        self.session = session
        self.permit = permit
        self.attached = False
        self.closing = False
        self.busy = 0
        self.timer: asyncio.TimerHandle | None = None
        self.ending: asyncio.Task[None] | None = None


def _parse(request: Any) -> tuple[str, dict[str, Any], Any]:
    fields = mapping(request)
    method = fields.get("method")
    if not isinstance(method, str):
        raise _RpcError(_INVALID, "Invalid request: a JSON object with a method is wanted")
    return method, mapping(fields.get("params")), fields.get("id")


def _tools_of(server: Any) -> dict[str, Any]:
    module: Any = importlib.import_module("openenv.core.env_server.mcp_environment")
    return module.get_server_tools(server)


def _described(tool: Any) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description or "",
        "inputSchema": tool.parameters or {},
    }


def _plain(value: Any) -> Any:
    return to_jsonable_python(value, fallback=str)


def _result(number: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}
