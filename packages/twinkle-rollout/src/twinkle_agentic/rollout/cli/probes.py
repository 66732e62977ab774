"""Short questions to servers: is somebody there, and what does it say."""

from __future__ import annotations

import time
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
    """

    name: str
    url: str
    ok: bool
    detail: str
    seconds: float


def probe_openenv(url: str, *, timeout_s: float = 5.0) -> Probe:
    """Ask an OpenEnv server for its health."""
    http = url.replace("ws://", "http://", 1).replace("wss://", "https://", 1)
    return _probe("OpenEnv server", http, "/health", timeout_s=timeout_s)


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
) -> Probe:
    import httpx  # 0.15 s to import; only the commands that ask need it

    start = time.monotonic()

    def answer(ok: bool, detail: str) -> Probe:
        return Probe(name=name, url=url, ok=ok, detail=detail, seconds=time.monotonic() - start)

    try:
        loopback = is_loopback(urlsplit(url).hostname)
        with httpx.Client(timeout=timeout_s, trust_env=not loopback) as client:
            response = client.get(url.rstrip("/") + path, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return answer(False, f"{type(error).__name__}: {error}")
    status = response.status_code
    ok = status < 400 or (lenient and status < 500 and status not in (401, 403))
    return answer(ok, f"HTTP {status}" if not ok else _said(response))


def _said(response: Any) -> str:
    try:
        body: Any = response.json()
    except ValueError:
        body = None
    fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    models = fields.get("data")
    if isinstance(models, list):
        names = [str(model.get("id")) for model in cast("list[dict[str, Any]]", models)]
        return "models: " + (", ".join(names[:3]) or "none")
    return str(fields.get("status") or f"HTTP {response.status_code}")
