"""The control API: sandboxes."""

from __future__ import annotations

import os
import time
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sandbox_server import copies
from sandbox_server.api.pages import page_of
from sandbox_server.api.routes import both
from sandbox_server.config import ENVD_VERSION
from sandbox_server.errors import ApiError
from sandbox_server.http import JsonResponse, read
from sandbox_server.models import Environment, Message, Text, limited_texts, time_text
from sandbox_server.record import SandboxRecord
from sandbox_server.registry import Registry

_V1_DEFAULT_TIMEOUT_S = 15.0
_CPUS = os.cpu_count() or 1
_MAX_METADATA_CHARS = 64 << 10
_MAX_FORKS = 20

Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Metadata = Annotated[
    dict[Text, Text], AfterValidator(lambda texts: limited_texts(texts, _MAX_METADATA_CHARS))
]


class _TimeoutRequest(Message):
    timeout: Seconds | None = None
    duration: Seconds | None = None
    auto_pause: bool | None = None


class _AutoResume(Message):
    enabled: bool = False


class _NetworkRules(Message):
    allow_out: list[Any] = Field(default=[])
    deny_out: list[Any] = Field(default=[])
    rules: Any = None


class _CreateRequest(Message, extra="allow"):
    template_id: Text = Field("base", alias="templateID")
    timeout: Seconds | None = None
    metadata: Metadata = Field(default={})
    env_vars: Environment = Field(default={})
    auto_pause: bool = False
    auto_resume: _AutoResume = _AutoResume()
    secure: bool = False
    internet: bool | None = Field(
        None, validation_alias=AliasChoices("allow_internet_access", "allowInternetAccess")
    )
    network: _NetworkRules = _NetworkRules()
    iam: Any = None
    mcp: Any = None
    volume_mounts: Any = None


class _PauseRequest(Message):
    memory: bool = True


class _ForkRequest(Message):
    count: int = Field(1, strict=True, ge=1, le=_MAX_FORKS)
    timeout: Seconds | None = None


class _SandboxQuery(Message):
    limit: int = Field(100, ge=1, le=1000)
    next_token: Text | None = None
    state: Annotated[
        frozenset[str] | None,
        BeforeValidator(lambda text: frozenset(text.split(",")) if text else None),
    ] = None
    metadata: Text = ""
    template: Text | None = None
    order: Text = "desc"
    started_after: datetime | None = None

    @field_validator("state")
    @classmethod
    def _check_state(cls, states: frozenset[str] | None) -> frozenset[str] | None:
        if states is not None and not states <= {"running", "paused"}:
            raise ValueError("use running, paused or both")
        return states

    @field_validator("started_after", mode="before")
    @classmethod
    def _parse_time(cls, text: Any) -> datetime | None:
        return datetime.fromisoformat(str(text).replace(" ", "+")) if text else None


def found(request: Request) -> tuple[Registry, SandboxRecord]:
    """Return the registry, and the sandbox that the path names. Raises 404."""
    registry: Registry = request.app.registry
    return registry, registry.get(request.path_params["id"])


async def _create(request: Request) -> Response:
    registry: Registry = request.app.registry
    wanted = await read(request, _CreateRequest)
    for name in ("iam", "mcp", "volume_mounts"):
        if getattr(wanted, name):
            raise ApiError(400, f"{name} is not supported by this server")
    v2 = _is_v2(request)
    default = registry.config.default_timeout_s if v2 else _V1_DEFAULT_TIMEOUT_S
    timeout_s = registry.allowed_timeout(wanted.timeout, default)
    network = _wants_network(registry, wanted)

    async def make() -> SandboxRecord:
        begun = time.perf_counter()
        record = await registry.launch(
            registry.templates.get(wanted.template_id or "base"),
            env=wanted.env_vars,
            network=network,
            timeout_s=timeout_s,
            metadata=wanted.metadata,
            secure=v2 or wanted.secure,
            auto_pause=wanted.auto_pause,
            auto_resume=wanted.auto_resume.enabled,
        )
        registry.metrics.create_seconds.observe(time.perf_counter() - begun)
        return record

    key = request.headers.get("idempotency-key")
    record = await (make() if key is None else registry.keys.once(key, wanted.model_dump(), make))
    return JsonResponse(session(registry, record), 201)


def _is_v2(request: Request) -> bool:
    return request.scope["path"].startswith("/v2/")


def _wants_network(registry: Registry, wanted: _CreateRequest) -> bool:
    """Tell whether a sandbox gets a network; refuse what would not be kept."""
    possible = registry.config.network
    network = possible if wanted.internet is None else wanted.internet
    if network and not possible:
        raise ApiError(400, "allow_internet_access=true: this server was started without --network")
    if wanted.internet is False and registry.isolation == "process":
        raise ApiError(
            400, "allow_internet_access=false: without isolation it cannot be taken away"
        )
    rules = wanted.network
    if rules.allow_out or rules.rules or (rules.deny_out and network):
        raise ApiError(400, "network rules are not supported by this server: it has all or nothing")
    return network


async def _connect(request: Request) -> Response:
    registry, record = found(request)
    message = await read(request, _TimeoutRequest)
    timeout_s = registry.allowed_timeout(message.timeout, registry.config.default_timeout_s)
    if await registry.resume(record, timeout_s):
        return JsonResponse(session(registry, record), 201)
    registry.extend(record, timeout_s)
    return JsonResponse(session(registry, record))


async def _resume(request: Request) -> Response:
    registry, record = found(request)
    message = await read(request, _TimeoutRequest)
    timeout_s = registry.allowed_timeout(message.timeout, _V1_DEFAULT_TIMEOUT_S)
    if message.auto_pause is not None:
        record.auto_pause = message.auto_pause
    if not await registry.resume(record, timeout_s):
        raise ApiError(409, f"sandbox {record.sandbox_id!r} is running already")
    return JsonResponse(session(registry, record), 201)


async def _listing(request: Request) -> Response:
    registry: Registry = request.app.registry
    query = _SandboxQuery.model_validate(dict(request.query_params))
    v2 = _is_v2(request)
    states = query.state or ({"running", "paused"} if v2 else {"running"})
    # The SDK quotes names and values once before it builds the query string.
    metadata = {
        unquote(name): unquote(value)
        for name, value in parse_qsl(query.metadata, keep_blank_values=True)
    }
    after = query.started_after.timestamp() if query.started_after else 0.0
    records = [
        record
        for record in registry.records.values()
        if record.state in states
        and metadata.items() <= record.metadata.items()
        and query.template in (None, record.template_id, record.alias)
        and record.started_at > after
    ]
    page, headers = page_of(
        records,
        lambda record: (record.started_at, record.sandbox_id),
        token=query.next_token,
        limit=query.limit if v2 else None,
        descending=query.order != "asc",
    )
    return JsonResponse([_described(record) for record in page], headers=headers)


async def _info(request: Request) -> Response:
    registry, record = found(request)
    lifecycle = {
        "onTimeout": "pause" if record.auto_pause else "kill",
        "autoResume": record.auto_resume,
    }
    more = {"allowInternetAccess": record.allow_internet, "lifecycle": lifecycle}
    return JsonResponse(session(registry, record) | _described(record) | more)


async def _kill(request: Request) -> Response:
    registry, record = found(request)
    await registry.kill(record)
    return Response(status_code=204)


async def _set_timeout(request: Request) -> Response:
    registry, record = found(request)
    message = await read(request, _TimeoutRequest)
    if message.timeout is None:
        raise ApiError(400, "timeout is missing")
    registry.set_timeout(record, registry.allowed_timeout(message.timeout, 0))
    return Response(status_code=204)


async def _refresh(request: Request) -> Response:
    registry, record = found(request)
    message = await read(request, _TimeoutRequest)
    registry.extend(record, registry.allowed_timeout(message.duration, _V1_DEFAULT_TIMEOUT_S))
    return Response(status_code=204)


async def _pause(request: Request) -> Response:
    registry, record = found(request)
    if not (await read(request, _PauseRequest)).memory:
        raise ApiError(400, "a pause without memory is not supported: take a snapshot instead")
    await registry.pause(record)
    return Response(status_code=204)


async def _fork(request: Request) -> Response:
    registry, record = found(request)
    message = await read(request, _ForkRequest)
    timeout_s = registry.allowed_timeout(message.timeout, registry.config.default_timeout_s)
    answers: list[dict[str, Any]] = []
    for result in await copies.fork(registry, record, message.count, timeout_s):
        if isinstance(result, ApiError):
            answers.append({"error": {"code": result.status, "message": result.message}})
        else:
            answers.append({"sandbox": session(registry, result)})
    return JsonResponse(answers, 201)


async def _metrics(request: Request) -> Response:
    _, record = found(request)
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
    return JsonResponse([sample])


async def _network(request: Request) -> Response:
    found(request)
    raise ApiError(400, "the network of a running sandbox cannot be changed on this server")


def session(registry: Registry, record: SandboxRecord) -> dict[str, Any]:
    """Return what a client needs to reach a sandbox."""
    return {
        **_identity(record),
        "isolation": registry.isolation,
        **({} if record.token is None else {"envdAccessToken": record.token}),
        **({} if record.token is None else {"trafficAccessToken": record.traffic_token}),
        **({"domain": registry.config.domain} if registry.config.domain else {}),
    }


def _identity(record: SandboxRecord) -> dict[str, Any]:
    return {
        "sandboxID": record.sandbox_id,
        "templateID": record.template_id,
        "clientID": "local",
        "envdVersion": ENVD_VERSION,
        **({} if record.alias is None else {"alias": record.alias}),
    }


def _described(record: SandboxRecord) -> dict[str, Any]:
    return {
        **_identity(record),
        "startedAt": time_text(record.started_at),
        "endAt": time_text(record.ends_at),
        "cpuCount": _CPUS,
        "memoryMB": record.memory_bytes >> 20,
        "diskSizeMB": record.disk_bytes >> 20,
        "state": record.state,
        "metadata": record.metadata,
    }


def _cpu_percent(record: SandboxRecord, cpu_s: float) -> float:
    """Return the use of one CPU, in percent, since the last time this was asked."""
    now = time.monotonic()
    last_at, last_s = record.cpu_sample or (record.begun, 0.0)
    record.cpu_sample = (now, cpu_s)
    return round(100 * max(0.0, cpu_s - last_s) / max(0.001, now - last_at), 2)


ROUTES: list[Route] = [
    *both("POST", "/sandboxes", _create),
    *both("GET", "/sandboxes", _listing),
    *both("POST", "/sandboxes/{id}/connect", _connect),
    *both("POST", "/sandboxes/{id}/resume", _resume),
    *both("POST", "/sandboxes/{id}/pause", _pause),
    *both("POST", "/sandboxes/{id}/timeout", _set_timeout),
    *both("POST", "/sandboxes/{id}/refreshes", _refresh),
    *both("POST", "/sandboxes/{id}/fork", _fork),
    *both("GET", "/sandboxes/{id}/metrics", _metrics),
    *both("PUT", "/sandboxes/{id}/network", _network),
    *both("GET", "/sandboxes/{id}", _info),
    *both("DELETE", "/sandboxes/{id}", _kill),
]
