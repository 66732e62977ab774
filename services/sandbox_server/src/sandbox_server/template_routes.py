"""The control plane: templates, their builds, and snapshots."""

from __future__ import annotations

import os
import re
import uuid
from typing import Any
from urllib.parse import unquote

from sandbox_server.build import BuildRequest, run_build
from sandbox_server.config import ENVD_VERSION
from sandbox_server.copies import snapshot
from sandbox_server.errors import ApiError
from sandbox_server.http import Request, Response, json_response
from sandbox_server.pages import page_of
from sandbox_server.registry import Registry
from sandbox_server.routing import Route, route
from sandbox_server.templates import BuildState, Template, new_id
from sandbox_server.values import as_count, as_list, as_text, time_text

__all__ = ["TEMPLATE_ROUTES"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_MAX_LOGS = 100
_PAGE = 100


def _checked_name(value: object) -> tuple[str, list[str]]:
    if not isinstance(value, str):
        raise ApiError(400, f"name must be text: got {value!r}")
    name, _, tag = value.partition(":")
    if not _NAME.fullmatch(name):
        raise ApiError(400, f"name {value!r} is not possible: letters, digits, `.`, `_`, `-`, `/`")
    return name, [tag] if tag else []


def _described(template: Template) -> dict[str, Any]:
    return {
        "templateID": template.template_id,
        "buildID": template.build_id or "00000000-0000-0000-0000-000000000000",
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


async def _request_build(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    message = await request.json(registry.config.max_request_bytes)
    name, tags = _checked_name(message.get("name") or message.get("alias"))
    tags += [as_text(tag, "a tag") for tag in as_list(message.get("tags"), "tags")]
    template = registry.templates.find(name)
    if template is None:
        template = Template(template_id=new_id(), names=[name])
        registry.templates.add(template)
    elif template.is_snapshot or template.template_id in registry.config.templates:
        raise ApiError(400, f"name {name!r} is taken by a snapshot or a template of the server")
    template.tags = sorted({*template.tags, *tags})
    build_id = str(uuid.uuid4())
    registry.templates.add_build(
        BuildState(
            template_id=template.template_id,
            build_id=build_id,
            memory_mb=as_count(message.get("memoryMB"), "memoryMB"),
            cpu_count=as_count(message.get("cpuCount"), "cpuCount"),
        )
    )
    answer = {
        "templateID": template.template_id,
        "buildID": build_id,
        "public": False,
        "names": template.names,
        "tags": tags or ["default"],
        "aliases": template.names,
    }
    return json_response(answer, 202)


def _build(registry: Registry, match: re.Match[str]) -> BuildState:
    build = registry.templates.builds.get(match["build"])
    template = registry.templates.find(unquote(match["id"]))
    if build is None or template is None or build.template_id != template.template_id:
        raise ApiError(404, f"build {match['build']!r} of template {match['id']!r} not found")
    return build


async def _start_build(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    build = _build(registry, match)
    if build.status != "waiting":
        raise ApiError(409, f"build {build.build_id!r} was started already")
    wanted = BuildRequest.parse(await request.json(registry.config.max_request_bytes))
    build.status = "building"
    build.task = registry.spawn(run_build(registry, build, wanted))
    return Response(202)


async def _build_status(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    build = _build(registry, match)
    offset = request.number("logsOffset", least=0, most=10**9, default=0)
    limit = request.number("limit", least=0, most=_MAX_LOGS, default=_MAX_LOGS)
    logs = build.logs[offset : offset + limit]
    answer: dict[str, Any] = {
        "templateID": build.template_id,
        "buildID": build.build_id,
        "status": build.status,
        "logs": [entry["message"] for entry in logs],
        "logEntries": logs,
    }
    if build.reason is not None:
        answer["reason"] = build.reason
    return json_response(answer)


def _template(registry: Registry, match: re.Match[str]) -> Template:
    name = unquote(match["id"])
    template = registry.templates.find(name)
    if template is None:
        raise ApiError(404, f"template {name!r} not found")
    return template


async def _alias(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    template = _template(registry, match)
    return json_response({"templateID": template.template_id, "public": False})


async def _list(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    return json_response([_described(t) for t in registry.templates.all(snapshots=False)])


async def _get(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    template = _template(registry, match)
    return json_response(_described(template) | {"builds": []})


async def _delete(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    template = _template(registry, match)
    if template.template_id in registry.config.templates:
        raise ApiError(400, f"template {unquote(match['id'])!r} belongs to the server")
    registry.templates.delete(template)
    return Response(204)


async def _files(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    raise ApiError(
        400, "COPY steps are not supported: write the files in a sandbox and snapshot it"
    )


async def _snapshot(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    message = await request.json(registry.config.max_request_bytes)
    if message.get("memory") is True:
        raise ApiError(400, "a snapshot with memory is not supported: this server saves files only")
    names: list[str] = []
    if message.get("name"):
        name, _ = _checked_name(message["name"])
        taken = registry.templates.find(name)
        if taken is not None and not taken.is_snapshot:
            raise ApiError(400, f"name {name!r} is taken by a template")
        names = [name]
    else:
        taken = None
    template = await snapshot(registry, registry.get(match["id"]), names)
    if taken is not None:
        registry.templates.delete(taken)
    return json_response(_snapshot_info(template), 201)


def _snapshot_info(template: Template) -> dict[str, Any]:
    identifier = template.names[0] if template.names else template.template_id
    return {
        "snapshotID": f"{identifier}:default",
        "names": [f"{n}:default" for n in template.names],
    }


async def _list_snapshots(registry: Registry, request: Request, match: re.Match[str]) -> Response:
    limit = request.number("limit", least=1, most=1000, default=_PAGE)
    snapshots = registry.templates.all(snapshots=True)
    source = request.parameter("sandboxID")
    if source is not None:
        snapshots = [t for t in snapshots if t.source_sandbox_id == source]
    page, headers = page_of(
        snapshots,
        lambda t: (t.created_at, t.template_id),
        token=request.parameter("nextToken"),
        limit=limit,
    )
    return json_response([_snapshot_info(t) for t in page], headers=headers)


_ID = r"(?P<id>[^/]+)"
TEMPLATE_ROUTES: list[Route] = [
    route("POST", r"/v3/templates", _request_build),
    route("POST", rf"/v2/templates/{_ID}/builds/(?P<build>[^/]+)", _start_build),
    route("GET", rf"/templates/{_ID}/builds/(?P<build>[^/]+)/status", _build_status),
    route("GET", r"/templates/aliases/(?P<id>.+)", _alias),
    route("GET", rf"/templates/{_ID}/files/[^/]+", _files),
    route("GET", r"(/v2)?/templates", _list),
    route("GET", rf"/templates/{_ID}", _get),
    route("DELETE", r"/templates/(?P<id>.+)", _delete),
    route("POST", r"(/v2)?/sandboxes/(?P<id>[A-Za-z0-9_-]+)/snapshots", _snapshot),
    route("GET", r"/snapshots", _list_snapshots),
]
