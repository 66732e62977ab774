"""Where a sandbox server is and which key it wants: per instance, never through `os.environ`."""

from __future__ import annotations

import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError
from twinkle_agentic.envs.agentenv.waiting import check_process

__all__ = ["DEFAULT_KEY", "Connection"]

DEFAULT_KEY = "dummy"
"""Sent where no key is given: a server without authentication wants one that is not empty."""

_SDK_RETRIES = 3  # of idempotent control-plane calls; creation has its own retries

_OPTIONS = frozenset({"api_headers", "domain", "http_version", "proxy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A sandbox server.

    Attributes:
        api_url: Base URL of the control plane; `None` leaves it to the SDK (E2B's own cloud).
        sandbox_url: Base URL of requests to a sandbox; `None` leaves it to the SDK.
        api_key: The key; not part of the `repr`.
        request_timeout: Seconds one request may take.
        options: Further connection options of the SDK: `proxy`, `http_version`, `domain`,
            `api_headers`.
    """

    api_url: str | None
    sandbox_url: str | None
    api_key: str = field(repr=False)
    request_timeout: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def resolve(
        cls,
        *,
        api_url: str | None = None,
        api_key: str | None = None,
        sandbox_url: str | None = None,
        request_timeout: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> Connection:
        """Fill in what was not given from `E2B_API_URL`, `E2B_SANDBOX_URL` and `E2B_API_KEY`.

        The sandbox address follows the API address, so one URL is enough. `E2B_SANDBOX_URL` belongs
        to `E2B_API_URL`: it does not redirect the sandboxes of another server given as `api_url`.

        Raises:
            ValueError: A URL is no http(s) URL, `request_timeout` is not above 0, an option is
                unknown.
        """
        unknown = set(options or {}) - _OPTIONS
        if unknown:
            raise ValueError(
                f"unknown connection options {sorted(unknown)}: there are {sorted(_OPTIONS)}"
            )
        if not request_timeout > 0:
            raise ValueError(f"request_timeout must be above 0 seconds, found {request_timeout!r}")
        from_environment = os.environ.get("E2B_API_URL") or None
        api = _url("api_url", api_url or from_environment)
        given = sandbox_url
        if given is None and api == _url("E2B_API_URL", from_environment):
            given = os.environ.get("E2B_SANDBOX_URL") or None
        if given is None and not _is_cloud(api):
            given = api
        return cls(
            api_url=api,
            sandbox_url=_url("sandbox_url", given),
            api_key=api_key or os.environ.get("E2B_API_KEY") or DEFAULT_KEY,
            request_timeout=float(request_timeout),
            options=dict(options or {}),
        )

    @property
    def address(self) -> str:
        """The server's name for messages."""
        return self.api_url or f"https://api.{self.options.get('domain') or 'e2b.app'}"

    def identity(self) -> tuple[str, str | None, str]:
        """What makes two connections lead to the same account of the same server."""
        return (self.address, self.sandbox_url, self.api_key)

    def params(self, **changed: Any) -> dict[str, Any]:
        """Return the SDK's connection arguments.

        Raises:
            SandboxRefusedError: There is neither a server nor a key, or the SDK does not work in
                this process (`check_process`).
        """
        if self.api_url is None and self.api_key == DEFAULT_KEY and "domain" not in self.options:
            raise SandboxRefusedError(
                "there is no sandbox server to talk to: pass api_url or set E2B_API_URL"
            )
        check_process()
        found: dict[str, Any] = {
            **self.options,
            "api_key": self.api_key,
            "debug": False,  # E2B_DEBUG would turn create and kill into no-ops
            "request_timeout": self.request_timeout,
            "retries": _SDK_RETRIES,
        }
        if self.api_url is not None:
            found["api_url"] = self.api_url
        if self.sandbox_url is not None:
            found["sandbox_url"] = self.sandbox_url
        return {**found, **changed}

    def proxy_hint(self) -> str:
        """Say so where requests go through a proxy of the environment; empty where they do not."""
        url = urllib.parse.urlsplit(self.address)
        proxy = urllib.request.getproxies().get(url.scheme) if "proxy" not in self.options else None
        if not proxy or not url.hostname or urllib.request.proxy_bypass(url.hostname):
            return ""
        return (
            f" (requests to {url.hostname} go through the proxy {proxy}: list the host in NO_PROXY "
            "to go direct)"
        )


def _url(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    parts = urllib.parse.urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name} must be an http:// or https:// URL, found {value!r}")
    return value.rstrip("/")


def _is_cloud(api_url: str | None) -> bool:
    """E2B's own service has one address for the API and another for the sandboxes."""
    host = urllib.parse.urlsplit(api_url or "").hostname or "api.e2b.app"
    return host.startswith("api.e2b.") or host.startswith("api.e2b-")
