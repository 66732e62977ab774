"""Short questions to servers: is somebody there, and what does it say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from twinkle_agentic.tools.hosts import is_loopback

__all__ = ["Probe", "probe_model", "probe_openenv", "probe_sandboxes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The answer of one server.

    Attributes:
        name: What was asked.
        url: Where.
        ok: Whether it serves.
        detail: What it said, or why not, in a few words.
        seconds: How long the answer took.
        models: What a model endpoint says that it serves; empty where it does not say.
    """

    name: str
    url: str
    ok: bool
    detail: str
    seconds: float
    models: tuple[str, ...] = ()


def probe_openenv(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server for its health."""
    http = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1)
    return _probe("OpenEnv server", http, "/health", timeout_s=timeout_s)


def probe_coding(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server whether its actions are code, as those of a coding server are."""
    http = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1)

    def takes_code(body: Any) -> str | None:
        names: Any = body.get("action", {}).get("properties", {})
        return None if "code" in names else f"its action has {', '.join(names)}, not code"

    return _probe("coding server", http, "/schema", timeout_s=timeout_s, check=takes_code)


def probe_model(url: str, *, api_key: str | None = None, timeout_s: float = 5.0) -> Probe:
    """Ask a chat-completions endpoint for its models.

    An endpoint without that route still serves: any answer below 500 but 401 and 403 counts.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return _probe(
        "model endpoint", url, "/models", timeout_s=timeout_s, headers=headers, lenient=True
    )


def probe_sandboxes(url: str, *, api_key: str | None = None, timeout_s: float = 5.0) -> Probe:
    """Ask a sandbox server for its list of sandboxes, which also checks the key."""
    return _probe(
        "sandbox server",
        url,
        "/v2/sandboxes?limit=1",
        timeout_s=timeout_s,
        headers={"X-API-Key": api_key or "dummy"},
    )


def _probe(
    name: str,
    url: str,
    path: str,
    *,
    timeout_s: float,
    headers: dict[str, str] | None = None,
    lenient: bool = False,
    check: Callable[[Any], str | None] | None = None,
) -> Probe:
    import httpx  # 0.15 s to import; only the commands that ask need it

    start = time.monotonic()

    def answer(ok: bool, detail: str, models: tuple[str, ...] = ()) -> Probe:
        seconds = time.monotonic() - start
        return Probe(name=name, url=url, ok=ok, detail=detail, seconds=seconds, models=models)

    try:
        loopback = is_loopback(urlsplit(url).hostname)
        with httpx.Client(timeout=timeout_s, trust_env=not loopback) as client:
            response = client.get(url.rstrip("/") + path, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return answer(False, f"{type(error).__name__}: {error}")
    status = response.status_code
    if status >= 400 and not (lenient and status < 500 and status not in (401, 403)):
        return answer(False, f"HTTP {status}")
    try:
        body: Any = response.json()
    except ValueError:
        body = None
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    if check is not None and (wrong := check(fields)) is not None:
        return answer(False, wrong)
    entries: Any = fields.get("data")
    listed = cast("list[dict[str, Any]]", entries) if isinstance(entries, list) else []
    models = tuple(str(model.get("id")) for model in listed)
    if models:
        return answer(True, f"models: {', '.join(models[:3])}", models)
    return answer(True, str(fields.get("status") or f"HTTP {status}"))
