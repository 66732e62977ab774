"""Short requests to servers: does one answer, and is it of the kind that was meant?"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.net import is_loopback
from twinkle_agentic.protocol._fields import fields_of, items_of

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Probe", "probe_coding", "probe_model", "probe_openenv", "probe_sandboxes"]

_SANDBOXES = "/v2/sandboxes?limit=1"
_REFUSED = (401, 403)
_NO_ROUTE = (404, 405, 501)
_MAX_BYTES = 16 * 2**20  # of one answer; a list of models has a megabyte at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The answer of one server.

    Attributes:
        name: The kind of server that was asked for.
        url: Where.
        ok: Whether such a server answers there.
        detail: What it answered, or what was found in its place and what to do.
        seconds: How long the answer took.
        models: What a model endpoint says that it serves; empty where it does not say.
    """

    name: str
    url: str
    ok: bool
    detail: str
    seconds: float
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back for one path.

    Attributes:
        said: The status, or why there was no answer.
        status: 0 where there was no answer.
        body: `None` where it is not JSON.
    """

    said: str
    status: int = 0
    body: object = None

    @property
    def answered_ok(self) -> bool:
        return 0 < self.status < 400

    @property
    def server_fault(self) -> bool:
        """Whether the server, of whatever kind, has a fault or wants another key."""
        status = self.status
        return status in (0, *_REFUSED) or (status >= 500 and status not in _NO_ROUTE)

    @property
    def fields(self) -> Mapping[str, Any]:
        return fields_of(self.body)

    @property
    def models(self) -> list[str] | None:
        """The names in a list of models; `None` where the answer is no such list.

        The list is `data` of an object, as OpenAI has it, or the whole answer, as some gateways do.
        """
        entries: Any = self.fields.get("data", self.body)
        if not self.answered_ok or not isinstance(entries, list):
            return None
        models = map(fields_of, items_of(cast("object", entries)))
        return [str(model["id"]) for model in models if "id" in model]

    @property
    def is_openenv(self) -> bool:
        return self.answered_ok and isinstance(self.fields.get("action"), dict)


_Ask = Callable[..., Awaitable[_Answer]]
"""`ask(path, method="GET")`: does not raise."""


def probe_openenv(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server for its health, and for its schema: other servers have a health too."""

    async def check(ask: _Ask) -> tuple[bool, str]:
        health = await ask("/health")
        if not health.answered_ok:
            return False, await _other(ask, health, "OpenEnv server")
        schema = await ask("/schema")
        if not schema.is_openenv:
            return False, await _other(ask, schema, "OpenEnv server")
        return True, str(health.fields.get("status") or f"HTTP {health.status}")

    return _probe("OpenEnv server", url, check, timeout_s=timeout_s, key=_openenv_token())


def probe_coding(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server whether its actions are code, as those of a coding server are."""

    async def check(ask: _Ask) -> tuple[bool, str]:
        answer = await ask("/schema")
        if not answer.is_openenv:
            return False, await _other(ask, answer, "coding server")
        names = fields_of(answer.fields["action"].get("properties"))
        if "code" in names:
            return True, "its action is code"
        return False, f"its action has {', '.join(names)}, not code"

    return _probe("coding server", url, check, timeout_s=timeout_s, key=_openenv_token())


def probe_model(
    url: str, *, api_key: str | None = None, timeout_s: float = 5.0, lenient: bool = False
) -> Probe:
    """Ask a chat-completions endpoint for its models.

    Where it has no such list, an empty request for a completion, which no model answers, shows
    whether the route exists.

    Args:
        url: Its base URL, with the `/v1` where it has one.
        api_key: Its key.
        timeout_s: Seconds for each answer.
        lenient: Accept also an endpoint that is known by neither route, unless it serves under
            `/v1`: what it answers to an empty request is up to the endpoint.
    """
    found: list[str] = []

    async def check(ask: _Ask) -> tuple[bool, str]:
        answer = await ask("/models")
        if answer.models is not None:
            found.extend(answer.models)
            return True, f"models: {', '.join(found[:3])}" if found else "an empty list of models"
        if answer.server_fault:
            return False, answer.said
        below = await ask("/v1/models")
        # An endpoint may guard only what is under /v1; one that guards all has refused above.
        if below.models is not None or below.status in _REFUSED:
            return False, f"{answer.said}: did you mean {url.rstrip('/')}/v1?"
        if lenient:
            return True, answer.said
        completions = await ask("/chat/completions", method="POST")
        if completions.status in (0, *_NO_ROUTE) or completions.answered_ok:
            return False, await _other(ask, answer, "model endpoint")
        if completions.server_fault:
            return False, completions.said
        return True, f"lists no models ({answer.said}), has /chat/completions"

    return _probe("model endpoint", url, check, timeout_s=timeout_s, key=api_key, models=found)


def probe_sandboxes(url: str, *, api_key: str | None = None, timeout_s: float = 5.0) -> Probe:
    """Ask a sandbox server for its list of sandboxes, which also checks the key."""

    async def check(ask: _Ask) -> tuple[bool, str]:
        answer = await ask(_SANDBOXES)
        if answer.answered_ok and isinstance(answer.body, list):
            return True, f"HTTP {answer.status}"
        if answer.status in _REFUSED:
            return False, f"{answer.said}: set E2B_API_KEY to its key"
        return False, await _other(ask, answer, "sandbox server")

    headers = {"X-API-Key": api_key or "dummy"}
    return _probe("sandbox server", url, check, timeout_s=timeout_s, headers=headers)


def _probe(
    name: str,
    url: str,
    check: Callable[[_Ask], Awaitable[tuple[bool, str]]],
    *,
    timeout_s: float,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    models: list[str] | None = None,
) -> Probe:
    import aiohttp  # takes 0.2 s; only the commands that ask need it

    async def work() -> tuple[bool, str]:
        base = url.rstrip("/")
        if base.startswith(("ws://", "wss://")):
            base = "http" + base.removeprefix("ws")
        try:
            loopback = is_loopback(urlsplit(base).hostname)
        except ValueError as error:
            return False, f"no URL: {error}"
        async with aiohttp.ClientSession(
            headers=headers or ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trust_env=not loopback,
        ) as session:

            async def ask(path: str, *, method: str = "GET") -> _Answer:
                return await _ask(session, method, base, path, timeout_s=timeout_s)

            return await check(ask)

    start = time.monotonic()
    ok, detail = run_sync(work())
    seconds = time.monotonic() - start
    return Probe(
        name=name, url=url, ok=ok, detail=detail, seconds=seconds, models=tuple(models or ())
    )


async def _ask(
    session: aiohttp.ClientSession, method: str, base: str, path: str, *, timeout_s: float
) -> _Answer:
    import aiohttp

    data = bytearray()
    empty: Any = {} if method == "POST" else None
    try:
        # The limits hold for the whole answer, not for each piece of it.
        async with (
            asyncio.timeout(timeout_s),
            session.request(method, base + path, json=empty) as response,
        ):
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > _MAX_BYTES:
                    return _Answer(f"the answer has more than {_MAX_BYTES >> 20} MiB")
            status = response.status
    except TimeoutError:
        return _Answer(f"no complete answer within {timeout_s:g} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return _Answer(_reason(error))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    return _Answer(f"HTTP {status} from {path}", status, body)


def _reason(error: Exception) -> str:
    """Say what failed, in the words of the system where there are any."""
    errno = getattr(error, "errno", None)
    if isinstance(errno, int) and errno > 0:
        return os.strerror(errno)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _other(ask: _Ask, answer: _Answer, wanted: str) -> str:
    """Say what answers in place of the server that was meant, and what to do."""
    if not answer.status:
        return answer.said
    found = await _kind(ask, refuses_all=answer.status in _REFUSED)
    if found is None or wanted in found:
        return f"{answer.said}, so it is no {wanted}: check the host, the port and the path"
    return f"{answer.said}: {found} answers there, give the URL of the {wanted}"


async def _kind(ask: _Ask, *, refuses_all: bool) -> str | None:
    if (await ask("/schema")).is_openenv:
        return "an OpenEnv server"
    for path in ("/models", "/v1/models"):
        if (await ask(path)).models is not None:
            return "a model endpoint"
    sandboxes = await ask(_SANDBOXES)
    refused = sandboxes.status in _REFUSED and not refuses_all
    lists = sandboxes.answered_ok and isinstance(sandboxes.body, list)
    return "a sandbox server" if refused or lists else None


def _openenv_token() -> str | None:
    return os.environ.get("OPENENV_TOKEN")
