"""The control plane: sandboxes."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from sandbox_server.access import check_access
from sandbox_server.config import ENVD_VERSION
from sandbox_server.copies import fork
from sandbox_server.create_request import CreateRequest, checked_timeout
from sandbox_server.errors import ApiError
from sandbox_server.http import Request, Response, json_response
from sandbox_server.pages import page_of
from sandbox_server.record import SandboxRecord
from sandbox_server.registry import Registry
from sandbox_server.routing import Route, route
from sandbox_server.template_routes import TEMPLATE_ROUTES
from sandbox_server.values import time_text

__all__ = ["serve_control"]

_V1_DEFAULT_TIMEOUT_S = 15.0
_MAX_FORKS = 20
_PAGE = 100
_CLIENT_ID = "local"
_CPUS = os.cpu_count() or 1


async def serve_control(registry: Registry, request: Request) -> Response:
    """Answer one request of the control plane.

    Raises:
        ApiError: What the answer is then made from.
    """
    check_access(request, registry.config.api_key)
    allowed: set[str] = set()
    for known in ROUTES:
        match = known.pattern.fullmatch(request.path)
        if match is None:
            continue
        if known.method == request.method:
            return await known.handler(registry, request, match)
        allowed.add(known.method)
    if allowed:
        raise ApiError(405, f"{request.method} {request.path}: use {' or '.join(sorted(allowed))}")
    raise ApiError(404, f"route not found: {request.method} {request.path}")


def session(registry: Registry, record: SandboxRecord) -> dict[str, Any]:
    """Return what a client needs to reach a sandbox."""
    answer: dict[str, Any] = {
        "sandboxID": record.sandbox_id,
        "templateID": record.template_id,
        "clientID": _CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "isolation": registry.isolation,
    }
    if record.alias is not None:
        answer["alias"] = record.alias
    if record.token is not None:
        answer["envdAccessToken"] = record.token
    if registry.config.domain:
        answer["domain"] = registry.config.domain
    return answer


def _listed(record: SandboxRecord) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "sandboxID": record.sandbox_id,
        "templateID": record.template_id,
        "clientID": _CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "startedAt": time_text(record.started_at),
        "endAt": time_text(record.ends_at),
        "cpuCount": _CPUS,
        "memoryMB": record.memory_bytes >> 20,
        "diskSizeMB": record.disk_bytes >> 20,
        "state": record.state,
        "metadata": record.metadata,
    }
    if record.alias is not None:
        answer["alias"] = record.alias
    return answer


async def _create(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    message = await request.json(registry.config.max_request_bytes)
    v2 = match["v2"] is not None
    default = registry.config.default_timeout_s if v2 else _V1_DEFAULT_TIMEOUT_S
    wanted = CreateRequest(message, registry.config, default, isolation=registry.isolation)
    key = request.headers.get("idempotency-key")
    secure = v2 or bool(message.get("secure"))
    record = await registry.create(wanted, secure=secure, key=key, message=message)
    return json_response(session(registry, record), 201)


async def _connect(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    message = await request.json(registry.config.max_request_bytes)
    timeout = checked_timeout(
        message.get("timeout", registry.config.default_timeout_s), registry.config
    )
    if await registry.resume(record, timeout):
        return json_response(session(registry, record), 201)
    registry.extend(record, timeout)
    return json_response(session(registry, record), 200)


async def _resume(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    message = await request.json(registry.config.max_request_bytes)
    timeout = checked_timeout(message.get("timeout", _V1_DEFAULT_TIMEOUT_S), registry.config)
    if "autoPause" in message:
        record.auto_pause = bool(message["autoPause"])
    if not await registry.resume(record, timeout):
        raise ApiError(409, f"sandbox {record.sandbox_id!r} is running already")
    return json_response(session(registry, record), 201)


async def _list(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    limit = request.number("limit", least=1, most=1000, default=_PAGE)
    default_state = "running,paused" if match["v2"] else "running"
    states = set((request.parameter("state") or default_state).split(","))
    if not states <= {"running", "paused"}:
        raise ApiError(400, f"state={request.parameter('state')!r}: use running, paused or both")
    wanted = _metadata_filter(request)
    template = request.parameter("template")
    descending = request.parameter("order") != "asc"
    started_after = request.parameter("startedAfter")
    after = _parse_time(started_after) if started_after else None
    records = [
        record
        for record in registry.records.values()
        if record.state in states
        and wanted.items() <= record.metadata.items()
        and (template is None or template in (record.template_id, record.alias))
        and (after is None or record.started_at > after)
    ]
    page, headers = page_of(
        records,
        lambda r: (r.started_at, r.sandbox_id),
        token=request.parameter("nextToken"),
        limit=limit if match["v2"] else None,
        descending=descending,
    )
    return json_response([_listed(record) for record in page], headers=headers)


def _metadata_filter(request: Request) -> dict[str, str]:
    text = request.parameter("metadata")
    if not text:
        return {}
    # The SDK quotes names and values once before it builds the query string.
    return {
        unquote(name): unquote(value) for name, value in parse_qsl(text, keep_blank_values=True)
    }


def _parse_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except ValueError as error:
        raise ApiError(400, f"startedAfter={text!r} is not a time") from error


async def _info(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    answer = session(registry, record) | _listed(record)
    answer["allowInternetAccess"] = record.allow_internet
    answer["lifecycle"] = {
        "onTimeout": "pause" if record.auto_pause else "kill",
        "autoResume": record.auto_resume,
    }
    return json_response(answer)


async def _kill(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    await registry.kill(registry.get(match["id"]))
    return Response(204)


async def _timeout(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    message = await request.json(registry.config.max_request_bytes)
    registry.set_timeout(record, checked_timeout(message.get("timeout"), registry.config))
    return Response(204)


async def _refresh(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    message = await request.json(registry.config.max_request_bytes)
    duration = checked_timeout(message.get("duration", _V1_DEFAULT_TIMEOUT_S), registry.config)
    registry.extend(record, duration)
    return Response(204)


async def _pause(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    message = await request.json(registry.config.max_request_bytes)
    if message.get("memory") is False:
        raise ApiError(400, "a pause without memory is not supported: take a snapshot instead")
    await registry.pause(registry.get(match["id"]))
    return Response(204)


async def _fork(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    message = await request.json(registry.config.max_request_bytes)
    count = message.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_FORKS:
        raise ApiError(400, f"count={count!r} is not a number in 1..{_MAX_FORKS}")
    timeout = checked_timeout(
        message.get("timeout", registry.config.default_timeout_s), registry.config
    )
    answers: list[dict[str, Any]] = []
    for result in await fork(registry, record, count, timeout):
        if isinstance(result, ApiError):
            answers.append({"error": {"code": result.status, "message": result.message}})
        else:
            answers.append({"sandbox": session(registry, result)})
    return json_response(answers, 201)


async def _metrics(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    record = registry.get(match["id"])
    usage = await record.sandbox.usage()
    now = time.time()
    sample = {
        "timestamp": time_text(now),
        "timestampUnix": int(now),
        "cpuCount": _CPUS,
        "cpuUsedPct": _cpu_percent(record, usage.cpu_s),
        "memUsed": usage.memory_bytes,
        "memTotal": record.memory_bytes,
        "memCache": 0,
        "diskUsed": usage.disk_used_bytes,
        "diskTotal": usage.disk_total_bytes,
    }
    return json_response([sample])


def _cpu_percent(record: SandboxRecord, cpu_s: float) -> float:
    """Return the use of one CPU, in percent, since the last time this was asked."""
    now = time.monotonic()
    last_at, last_s = record.cpu_sample or (record.begun, 0.0)
    record.cpu_sample = (now, cpu_s)
    return round(100 * max(0.0, cpu_s - last_s) / max(0.001, now - last_at), 2)


async def _network(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    registry.get(match["id"])
    raise ApiError(400, "the network of a running sandbox cannot be changed on this server")


_ID = r"(?P<id>[A-Za-z0-9_-]+)"
ROUTES: list[Route] = [
    route("POST", r"(?P<v2>/v2)?/sandboxes", _create),
    route("GET", r"(?P<v2>/v2)?/sandboxes", _list),
    route("POST", rf"(/v2)?/sandboxes/{_ID}/connect", _connect),
    route("POST", rf"(/v2)?/sandboxes/{_ID}/resume", _resume),
    route("POST", rf"(/v2)?/sandboxes/{_ID}/pause", _pause),
    route("POST", rf"(/v2)?/sandboxes/{_ID}/timeout", _timeout),
    route("POST", rf"(/v2)?/sandboxes/{_ID}/refreshes", _refresh),
    route("POST", rf"(/v2)?/sandboxes/{_ID}/fork", _fork),
    route("GET", rf"(/v2)?/sandboxes/{_ID}/metrics", _metrics),
    route("PUT", rf"(/v2)?/sandboxes/{_ID}/network", _network),
    route("GET", rf"(/v2)?/sandboxes/{_ID}", _info),
    route("DELETE", rf"(/v2)?/sandboxes/{_ID}", _kill),
    *TEMPLATE_ROUTES,
]
