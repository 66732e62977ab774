"""What a server says of actions and observations: `GET /schema`, once per server and minute.

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
from twinkle_agentic.envs.openenv.link_settings import LinkSettings

if TYPE_CHECKING:
    import httpx

__all__ = ["ServerSchemas", "fetch_schemas"]

logger = logging.getLogger(__name__)

# A server that was replaced by another one at the same address is noticed after this long.
_FRESH_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSchemas:
    """JSON Schemas; `None` where the server does not say."""

    action: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None


_Key = tuple[str, tuple[tuple[str, str], ...]]
_asked: dict[_Key, tuple[float, asyncio.Task[ServerSchemas]]] = {}


async def fetch_schemas(settings: LinkSettings) -> ServerSchemas:
    """Return the JSON Schemas of the server's action and of its first observation.

    Returns:
        Empty where the server has no such endpoint: it speaks the protocol but does not say.

    Raises:
        SessionClosedError: The server cannot be reached, or says more than `max_message_bytes`.
        EnvTimeoutError: No answer within `connect_timeout_s`.
    """
    key = (settings.address.http_url, tuple(sorted((settings.headers or {}).items())))
    now = asyncio.get_running_loop().time()
    known = _asked.get(key)
    if known is not None and now - known[0] < _FRESH_S:
        task = known[1]
        if not task.done() or (not task.cancelled() and task.exception() is None):
            return await asyncio.shield(task)
    task = asyncio.ensure_future(_fetch(settings))
    task.add_done_callback(_seen)
    _asked[key] = (now, task)
    for old in [k for k, (when, _) in _asked.items() if now - when > 10 * _FRESH_S]:
        del _asked[old]
    return await asyncio.shield(task)


async def _fetch(settings: LinkSettings) -> ServerSchemas:
    body = await _get(settings, "schema")
    action = _schema(body, "action")
    if action is None:
        logger.info("%s does not describe its actions", settings.address.http_url)
    observation = _schema(body, "reset_observation") or _schema(body, "observation")
    return ServerSchemas(action=action, observation=observation)


async def fetch_capacity(settings: LinkSettings) -> int | None:
    """Return how many sessions a server has room for; 0 when it takes no new ones.

    Returns:
        `None` where the server does not say.

    Raises:
        SessionClosedError: The server cannot be reached, or says more than `max_message_bytes`.
        EnvTimeoutError: No answer within `connect_timeout_s`.
    """
    free = (await _get(settings, "capacity")).get("free")
    return free if isinstance(free, int) else None


async def _get(settings: LinkSettings, path: str) -> Mapping[str, Any]:
    """Return the JSON object at a path; empty where there is none."""
    import httpx  # 0.1 s, once; one server whose environment's package is installed needs it never

    url = f"{settings.address.http_url}/{path}"
    proxy = settings.proxy if isinstance(settings.proxy, str) else None
    ask_environment = settings.proxy is True and not settings.address.is_loopback
    limit = settings.connect_timeout_s
    try:
        async with (
            asyncio.timeout(limit),
            httpx.AsyncClient(
                timeout=limit,
                verify=url.startswith("https:"),  # else 20 ms for certificates that are not used
                headers=dict(settings.headers or {}),
                proxy=proxy,
                trust_env=ask_environment,
                follow_redirects=True,
            ) as client,
        ):
            status, data = await _read(client, url, max_bytes=settings.max_message_bytes)
            body: Any = json.loads(data) if status == 200 else None
    except (TimeoutError, httpx.TimeoutException) as error:
        raise EnvTimeoutError(
            f"no answer to GET {url} within connect_timeout_s={limit:g}"
        ) from error
    except httpx.HTTPError as error:
        raise SessionClosedError(
            f"cannot reach {url}: {error or type(error).__name__}: is the server running there?"
        ) from error
    except (ValueError, RecursionError):
        body = None
    return cast("Mapping[str, Any]", body) if isinstance(body, Mapping) else {}


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


def _seen(task: asyncio.Task[ServerSchemas]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waited has it


def _forget_after_fork() -> None:
    _asked.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
