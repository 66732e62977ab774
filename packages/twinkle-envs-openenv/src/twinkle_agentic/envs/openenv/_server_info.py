"""What a server says over HTTP: `GET /schema`, once per server and minute, and `GET /capacity`.

Coroutines of the background loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from twinkle_agentic.envs.errors import EnvTimeoutError, SessionClosedError
from twinkle_agentic.envs.openenv._config import ConnectionConfig, ServerAddress

if TYPE_CHECKING:
    import httpx

__all__ = ["ServerSchemas", "fetch_capacity", "fetch_schemas"]

logger = logging.getLogger(__name__)

# A server that was replaced by another one at the same address is noticed after this long.
_FRESH_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSchemas:
    """JSON Schemas; `None` where the server does not say, and `error` where it failed to."""

    action: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None
    error: str = ""


_Key = tuple[str, tuple[tuple[str, str], ...]]
_asked: dict[_Key, tuple[float, asyncio.Task[ServerSchemas]]] = {}


async def fetch_schemas(address: ServerAddress, config: ConnectionConfig) -> ServerSchemas:
    """Return the JSON Schemas of the server's action and of its first observation.

    Returns:
        Empty where the server has no such endpoint: it speaks the protocol but does not say. With
        an `error` where it has one that fails, as OpenEnv's does for a class without a JSON Schema.

    Raises:
        SessionClosedError: The server cannot be reached, or says more than `max_message_bytes`.
        EnvTimeoutError: No answer within `connect_timeout_s`.
    """
    key = (address.http_url, tuple(sorted((config.headers or {}).items())))
    now = asyncio.get_running_loop().time()
    asked_at, task = _asked.get(key, (now, None))
    failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
    if task is None or failed or now - asked_at > _FRESH_S:
        task = asyncio.ensure_future(_fetch(address, config))
        _asked[key] = (now, task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def _fetch(address: ServerAddress, config: ConnectionConfig) -> ServerSchemas:
    status, body = await _get(address, config, "schema")
    if body is None and status != 404:
        what = f"HTTP {status}" + (" without a JSON object" if status == 200 else "")
        error = f"GET {address.http_url}/schema answered {what}"
        logger.warning("%s", error)
        return ServerSchemas(error=error)
    body = body or {}
    action = _schema(body, "action")
    if action is None:
        logger.info("%s does not describe its actions", address.http_url)
    observation = _schema(body, "reset_observation") or _schema(body, "observation")
    return ServerSchemas(action=action, observation=observation)


async def fetch_capacity(address: ServerAddress, config: ConnectionConfig) -> int | None:
    """Return how many sessions a server has room for; 0 when it takes no new ones.

    Returns:
        `None` where the server does not say.

    Raises:
        SessionClosedError: The server cannot be reached, or says more than `max_message_bytes`.
        EnvTimeoutError: No answer within `connect_timeout_s`.
    """
    _, body = await _get(address, config, "capacity")
    free = (body or {}).get("free")
    return free if isinstance(free, int) else None


async def _get(
    address: ServerAddress, config: ConnectionConfig, path: str
) -> tuple[int, Mapping[str, Any] | None]:
    """Return the HTTP status and the JSON object at a path; `None` where there is none."""
    import httpx  # 0.1 s, once; one server whose environment's package is installed needs it never

    url = f"{address.http_url}/{path}"
    proxy = config.proxy_for(address)
    limit = config.connect_timeout_s
    try:
        async with (
            asyncio.timeout(limit),
            httpx.AsyncClient(
                timeout=limit,
                verify=url.startswith("https:"),  # else 20 ms for certificates that are not used
                headers=dict(config.headers or {}),
                proxy=proxy if isinstance(proxy, str) else None,
                trust_env=proxy is True,
                follow_redirects=True,
            ) as client,
        ):
            status, data = await _read(client, url, max_bytes=config.max_message_bytes)
    except (TimeoutError, httpx.TimeoutException) as error:
        raise EnvTimeoutError(
            f"no answer to GET {url} within connect_timeout_s={limit:g}"
        ) from error
    except httpx.HTTPError as error:
        raise SessionClosedError(
            f"cannot reach {url}: {error or type(error).__name__}: is the server running there?"
        ) from error
    try:
        body: Any = json.loads(data) if status == 200 else None
    except (ValueError, RecursionError):
        body = None
    return status, cast("Mapping[str, Any]", body) if isinstance(body, Mapping) else None


def _schema(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    found: Any = body.get(name)
    return dict(cast("Mapping[str, Any]", found)) if isinstance(found, Mapping) else None


async def _read(client: httpx.AsyncClient, url: str, *, max_bytes: int) -> tuple[int, bytes]:
    data = bytearray()
    async with client.stream("GET", url) as response:
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > max_bytes:
                raise SessionClosedError(
                    f"the answer to GET {url} is larger than max_message_bytes={max_bytes}: "
                    "is it an OpenEnv server?"
                )
        return response.status_code, bytes(data)


os.register_at_fork(after_in_child=_asked.clear)  # the tasks are of the parent's loop
