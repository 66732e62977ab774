"""Short questions to servers: is somebody there, of the kind that was meant, and what it says."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.net import is_loopback
from twinkle_agentic.protocol._fields import fields_of

if TYPE_CHECKING:
    import httpx

__all__ = ["Probe", "probe_coding", "probe_model", "probe_openenv", "probe_sandboxes"]

_SANDBOXES = "/v2/sandboxes?limit=1"
_REFUSED = (401, 403)
_NO_ROUTE = (404, 405, 501)
_MAX_BYTES = 16 * 2**20  # of one answer; lists of models have a megabyte at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The answer of one server.

    Attributes:
        name: What was asked.
        url: Where.
        ok: Whether it serves, as the kind of server that it was given as.
        detail: What it said, or what was found in its place and what to do, in a few words.
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
    """What came back for one path; the body is `None` where it is no JSON."""

    path: str
    status: int
    body: object

    @property
    def good(self) -> bool:
        return self.status < 400

    @property
    def fields(self) -> dict[str, Any]:
        body: Any = self.body
        return cast("dict[str, Any]", body) if isinstance(body, dict) else {}

    @property
    def said(self) -> str:
        return f"HTTP {self.status} from {self.path}"


_Ask = Callable[..., _Answer]
"""`ask(path, method="GET")`: raises what the HTTP client raises."""


def probe_openenv(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server for its health, and for its schema: other servers have a health too."""

    def check(ask: _Ask) -> tuple[bool, str]:
        health = ask("/health")
        if not health.good:
            return False, _other(ask, health, "OpenEnv server")
        schema = ask("/schema")
        if not _is_openenv(schema):
            return False, _other(ask, schema, "OpenEnv server")
        return True, str(health.fields.get("status") or f"HTTP {health.status}")

    headers = _token_header()
    return _probe("OpenEnv server", _http(url), check, timeout_s=timeout_s, headers=headers)


def probe_coding(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server whether its actions are code, as those of a coding server are."""

    def check(ask: _Ask) -> tuple[bool, str]:
        answer = ask("/schema")
        if not _is_openenv(answer):
            return False, _other(ask, answer, "coding server")
        names = fields_of(answer.fields["action"].get("properties"))
        if "code" in names:
            return True, "its action is code"
        return False, f"its action has {', '.join(names)}, not code"

    headers = _token_header()
    return _probe("coding server", _http(url), check, timeout_s=timeout_s, headers=headers)


def probe_model(
    url: str, *, api_key: str | None = None, timeout_s: float = 5.0, lenient: bool = False
) -> Probe:
    """Ask a chat-completions endpoint for its models.

    An endpoint without a list of them serves too, where it has the route of completions: a request
    without a body, which no model answers, tells.

    Args:
        url: Its base URL, with the `/v1` where it has one.
        api_key: Its key.
        timeout_s: Seconds for each answer.
        lenient: Take also an endpoint that is not known by either route, unless it serves under
            `/v1`: the answer to a request without a body is up to the endpoint.
    """
    found: list[str] = []

    def check(ask: _Ask) -> tuple[bool, str]:
        answer = ask("/models")
        if (models := _models(answer)) is not None:
            found.extend(models)
            return True, f"models: {', '.join(found[:3])}" if found else "an empty list of models"
        if _fails(answer):
            return False, answer.said
        below = _try(ask, "/v1/models")
        # An endpoint may guard only what is under /v1; one that guards all has refused above.
        if below and (_models(below) is not None or below.status in _REFUSED):
            return False, f"{answer.said}: did you mean {url.rstrip('/')}/v1?"
        if lenient:
            return True, answer.said
        completions = _try(ask, "/chat/completions", method="POST")
        if completions is None or completions.good or completions.status in _NO_ROUTE:
            return False, _other(ask, answer, "model endpoint")
        if _fails(completions):
            return False, completions.said
        return True, f"lists no models ({answer.said}), has /chat/completions"

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return _probe("model endpoint", url, check, timeout_s=timeout_s, headers=headers, models=found)


def probe_sandboxes(url: str, *, api_key: str | None = None, timeout_s: float = 5.0) -> Probe:
    """Ask a sandbox server for its list of sandboxes, which also checks the key."""

    def check(ask: _Ask) -> tuple[bool, str]:
        answer = ask(_SANDBOXES)
        if answer.good and isinstance(answer.body, list):
            return True, f"HTTP {answer.status}"
        if answer.status in _REFUSED:
            return False, f"{answer.said}: set E2B_API_KEY to its key"
        return False, _other(ask, answer, "sandbox server")

    headers = {"X-API-Key": api_key or "dummy"}
    return _probe("sandbox server", url, check, timeout_s=timeout_s, headers=headers)


def _probe(
    name: str,
    url: str,
    check: Callable[[_Ask], tuple[bool, str]],
    *,
    timeout_s: float,
    headers: dict[str, str] | None = None,
    models: list[str] | None = None,
) -> Probe:
    import httpx  # 0.15 s to import; only the commands that ask need it

    start = time.monotonic()
    try:
        with _asking(url, timeout_s=timeout_s, headers=headers) as ask:
            ok, detail = check(ask)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        ok, detail = False, _words(error)
    return Probe(
        name=name,
        url=url,
        ok=ok,
        detail=detail,
        seconds=time.monotonic() - start,
        models=tuple(models or ()),
    )


@contextmanager
def _asking(
    url: str, *, timeout_s: float, headers: dict[str, str] | None
) -> Generator[_Ask, None, None]:
    import httpx

    loopback = is_loopback(urlsplit(url).hostname)
    client = httpx.AsyncClient(timeout=timeout_s, trust_env=not loopback, headers=headers)

    def ask(path: str, *, method: str = "GET") -> _Answer:
        work = _exchange(client, method, url.rstrip("/") + path, timeout_s=timeout_s)
        status, data = run_sync(work)
        try:
            return _Answer(path, status, json.loads(data))
        except (ValueError, RecursionError):
            return _Answer(path, status, None)

    try:
        yield ask
    finally:
        run_sync(client.aclose())


async def _exchange(
    client: httpx.AsyncClient, method: str, url: str, *, timeout_s: float
) -> tuple[int, bytes]:
    """Ask once; the limits hold for the whole answer, not for each piece of it."""
    import httpx

    body: dict[str, Any] | None = {} if method == "POST" else None
    data = bytearray()
    try:
        async with asyncio.timeout(timeout_s), client.stream(method, url, json=body) as response:
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > _MAX_BYTES:
                    raise httpx.ReadError(f"the answer has more than {_MAX_BYTES >> 20} MiB")
            return response.status_code, bytes(data)
    except TimeoutError:
        raise httpx.ReadTimeout(f"no complete answer within {timeout_s:g} s") from None


def _words(error: Exception) -> str:
    """Say what failed; the system's own words where a connection did, which httpx keeps inside."""
    root: BaseException = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    refused = isinstance(root, ConnectionError) or type(root) is OSError
    errno = root.errno if refused and isinstance(root, OSError) else None
    words = os.strerror(errno) if errno else str(error) or repr(root)
    return f"{type(error).__name__}: {words}"


def _try(ask: _Ask, path: str, *, method: str = "GET") -> _Answer | None:
    """Ask a further question, of which nothing hangs."""
    import httpx

    try:
        return ask(path, method=method)
    except httpx.HTTPError:
        return None


def _other(ask: _Ask, answer: _Answer, wanted: str) -> str:
    """Say what serves in place of the server that was meant, and what to do."""
    found = _kind(ask, refuses_all=answer.status in _REFUSED)
    if found is None or wanted in found:
        return f"{answer.said}, so it is no {wanted}: check the host, the port and the path"
    return f"{answer.said}: {found} answers there, give the URL of the {wanted}"


def _kind(ask: _Ask, *, refuses_all: bool) -> str | None:
    schema = _try(ask, "/schema")
    if schema is not None and _is_openenv(schema):
        return "an OpenEnv server"
    for path in ("/models", "/v1/models"):
        listed = _try(ask, path)
        if listed is not None and _models(listed) is not None:
            return "a model endpoint"
    sandboxes = _try(ask, _SANDBOXES)
    if sandboxes is None:
        return None
    refused = sandboxes.status in _REFUSED and not refuses_all
    lists = sandboxes.good and isinstance(sandboxes.body, list)
    return "a sandbox server" if refused or lists else None


def _fails(answer: _Answer) -> bool:
    """Whether the server is in trouble or wants another key, whatever its kind."""
    return answer.status in _REFUSED or (answer.status >= 500 and answer.status not in _NO_ROUTE)


def _is_openenv(schema: _Answer) -> bool:
    return schema.good and isinstance(schema.fields.get("action"), dict)


def _models(answer: _Answer) -> list[str] | None:
    """Return the names in a list of models, `None` where the answer is none.

    The list is `data` of an object, as OpenAI has it, or the whole answer, as some gateways do.
    """
    entries: object = answer.fields.get("data", answer.body)
    if not answer.good or not isinstance(entries, list):
        return None
    found = cast("list[Any]", entries)
    return [str(cast("dict[str, Any]", m).get("id")) for m in found if isinstance(m, dict)]


def _token_header() -> dict[str, str]:
    token = os.environ.get("OPENENV_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _http(url: str) -> str:
    return url.replace("ws://", "http://", 1).replace("wss://", "https://", 1)
