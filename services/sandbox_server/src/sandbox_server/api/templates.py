"""The control API: templates, their builds, and snapshots."""

from __future__ import annotations

import os
import re
import uuid
from typing import Annotated, Any
from urllib.parse import unquote

from pydantic import AfterValidator, AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sandbox_server.api.pages import page_of
from sandbox_server.api.routes import both, route
from sandbox_server.api.sandboxes import found
from sandbox_server.build import BuildRequest, run_build
from sandbox_server.config import ENVD_VERSION
from sandbox_server.copies import snapshot
from sandbox_server.errors import ApiError
from sandbox_server.http import JsonResponse, read
from sandbox_server.models import Message, Text, time_text
from sandbox_server.registry import Registry
from sandbox_server.templates import BuildState, Template, new_id

_NO_BUILD = "00000000-0000-0000-0000-000000000000"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def _checked_name(text: str) -> str:
    if not _NAME.fullmatch(text.partition(":")[0]):
        raise ValueError("is not possible: letters, digits, `.`, `_`, `-`, `/`")
    return text


Name = Annotated[Text, AfterValidator(_checked_name)]
"""Of a template, with or without `:tag`."""


class _SnapshotRequest(Message):
    memory: bool = False
    name: Name | None = None


class _TemplateRequest(Message):
    name: Name = Field(validation_alias=AliasChoices("name", "alias"))
    tags: list[Text] = Field(default=[])
    memory_mb: int | None = Field(None, alias="memoryMB", strict=True, ge=1)
    cpu_count: int | None = Field(None, strict=True, ge=1)


class _SnapshotQuery(Message):
    limit: int = Field(100, ge=1, le=1000)
    next_token: Text | None = None
    sandbox_id: Text | None = Field(None, alias="sandboxID")


class _LogQuery(Message):
    logs_offset: int = Field(0, ge=0, le=10**9)
    limit: int = Field(100, ge=0, le=100)


async def _request_build(request: Request) -> Response:
    registry: Registry = request.app.registry
    wanted = await read(request, _TemplateRequest)
    name, _, tag = wanted.name.partition(":")
    tags = [*([tag] if tag else []), *wanted.tags]
    template = registry.templates.find(name)
    if template is None:
        template = Template(template_id=new_id(), names=[name])
        registry.templates.add(template)
    elif template.is_snapshot or template.template_id in registry.config.templates:
        raise ApiError(400, f"name {name!r} is taken by a snapshot or a template of the server")
    template.tags = sorted({*template.tags, *tags})
    build = BuildState(
        template_id=template.template_id,
        build_id=str(uuid.uuid4()),
        memory_mb=wanted.memory_mb,
        cpu_count=wanted.cpu_count,
    )
    registry.templates.add_build(build)
    answer = {
        "templateID": template.template_id,
        "buildID": build.build_id,
        "public": False,
        "names": template.names,
        "tags": tags or ["default"],
        "aliases": template.names,
    }
    return JsonResponse(answer, 202)


async def _start_build(request: Request) -> Response:
    registry, build = _build(request)
    if build.status != "waiting":
        raise ApiError(409, f"build {build.build_id!r} was started already")
    wanted = await read(request, BuildRequest)
    build.status = "building"
    build.task = registry.spawn(run_build(registry, build, wanted))
    return Response(status_code=202)


async def _build_status(request: Request) -> Response:
    _, build = _build(request)
    query = _LogQuery.model_validate(dict(request.query_params))
    logs = build.logs[query.logs_offset : query.logs_offset + query.limit]
    answer: dict[str, Any] = {
        "templateID": build.template_id,
        "buildID": build.build_id,
        "status": build.status,
        "logs": [entry["message"] for entry in logs],
        "logEntries": logs,
    }
    if build.reason is not None:
        answer["reason"] = build.reason
    return JsonResponse(answer)


async def _alias(request: Request) -> Response:
    _, template = _template(request)
    return JsonResponse({"templateID": template.template_id, "public": False})


async def _listing(request: Request) -> Response:
    registry: Registry = request.app.registry
    return JsonResponse([_described(t) for t in registry.templates.all(snapshots=False)])


async def _info(request: Request) -> Response:
    _, template = _template(request)
    return JsonResponse(_described(template) | {"builds": []})


async def _delete(request: Request) -> Response:
    registry, template = _template(request)
    if template.template_id in registry.config.templates:
        raise ApiError(400, f"template {template.template_id!r} belongs to the server")
    registry.templates.delete(template)
    return Response(status_code=204)


async def _files(request: Request) -> Response:
    raise ApiError(
        400, "COPY steps are not supported: write the files in a sandbox and snapshot it"
    )


async def _take_snapshot(request: Request) -> Response:
    registry, record = found(request)
    wanted = await read(request, _SnapshotRequest)
    if wanted.memory:
        raise ApiError(400, "a snapshot with memory is not supported: this server saves files only")
    names = [wanted.name.partition(":")[0]] if wanted.name else []
    taken = registry.templates.find(names[0]) if names else None
    if taken is not None and not taken.is_snapshot:
        raise ApiError(400, f"name {names[0]!r} is taken by a template")
    template = await snapshot(registry, record, names)
    if taken is not None:
        registry.templates.delete(taken)
    return JsonResponse(_snapshot_info(template), 201)


async def _list_snapshots(request: Request) -> Response:
    registry: Registry = request.app.registry
    query = _SnapshotQuery.model_validate(dict(request.query_params))
    page, headers = page_of(
        [
            template
            for template in registry.templates.all(snapshots=True)
            if query.sandbox_id in (None, template.source_sandbox_id)
        ],
        lambda template: (template.created_at, template.template_id),
        token=query.next_token,
        limit=query.limit,
    )
    return JsonResponse([_snapshot_info(template) for template in page], headers=headers)


def _template(request: Request) -> tuple[Registry, Template]:
    registry: Registry = request.app.registry
    name = unquote(request.path_params["id"])
    template = registry.templates.find(name)
    if template is None:
        raise ApiError(404, f"template {name!r} not found")
    return registry, template


def _build(request: Request) -> tuple[Registry, BuildState]:
    registry, template = _template(request)
    build = registry.templates.builds.get(request.path_params["build"])
    if build is None or build.template_id != template.template_id:
        raise ApiError(404, f"build {request.path_params['build']!r} not found")
    return registry, build


def _described(template: Template) -> dict[str, Any]:
    return {
        "templateID": template.template_id,
        "buildID": template.build_id or _NO_BUILD,
        "cpuCount": template.cpu_count or os.cpu_count() or 1,
        "memoryMB": template.memory_mb or 0,
        "diskSizeMB": 0,
        "public": False,
        "aliases": template.names,
        "names": template.names,
        "createdAt": time_text(template.created_at),
        "updatedAt": time_text(template.updated_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": template.spawn_count,
        "buildCount": template.build_count,
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready" if template.ready else "building",
    }


def _snapshot_info(template: Template) -> dict[str, Any]:
    names = [f"{name}:default" for name in template.names]
    return {"snapshotID": [*names, f"{template.template_id}:default"][0], "names": names}


ROUTES: list[Route] = [
    *both("POST", "/sandboxes/{id}/snapshots", _take_snapshot),
    route("POST", "/v3/templates", _request_build),
    route("POST", "/v2/templates/{id}/builds/{build}", _start_build),
    route("GET", "/templates/{id}/builds/{build}/status", _build_status),
    route("GET", "/templates/aliases/{id:path}", _alias),
    route("GET", "/templates/{id}/files/{hash}", _files),
    *both("GET", "/templates", _listing),
    route("GET", "/templates/{id}", _info),
    route("DELETE", "/templates/{id:path}", _delete),
    route("GET", "/snapshots", _list_snapshots),
]
