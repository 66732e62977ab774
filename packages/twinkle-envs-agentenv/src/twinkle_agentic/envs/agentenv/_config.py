"""Where a sandbox server is, and what a new sandbox there is like: plain data, checked."""

from __future__ import annotations

import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from twinkle_agentic.envs.agentenv._labels import PREFIX
from twinkle_agentic.envs.agentenv._sdk_calls import check_process
from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError

OnTimeout = Literal["pause", "kill"]
SetupErrors = Literal["raise", "observe"]

_DEFAULT_KEY = "dummy"  # a server without authentication wants a key that is not empty
_SDK_RETRIES = 3  # of calls of the SDK that may be repeated; `_retry` has those of creations
_OPTIONS = frozenset({"api_headers", "domain", "http_version", "proxy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A sandbox server; settings are per instance, `os.environ` is never written.

    Attributes:
        api_url: Base URL of the control API; `None` leaves it to the SDK (E2B's own cloud).
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
        if sandbox_url is None and api == _url("E2B_API_URL", from_environment):
            sandbox_url = os.environ.get("E2B_SANDBOX_URL") or None
        if sandbox_url is None and not _is_cloud(api):
            sandbox_url = api
        return cls(
            api_url=api,
            sandbox_url=_url("sandbox_url", sandbox_url),
            api_key=api_key or os.environ.get("E2B_API_KEY") or _DEFAULT_KEY,
            request_timeout=float(request_timeout),
            options=dict(options or {}),
        )

    @property
    def address(self) -> str:
        """The server's name for messages."""
        return self.api_url or f"https://api.{self.options.get('domain') or 'e2b.app'}"

    def params(self, **changed: Any) -> dict[str, Any]:
        """Return the SDK's connection arguments.

        Raises:
            SandboxRefusedError: There is neither a server nor a key, or the SDK does not work in
                this process (`check_process`).
        """
        if self.api_url is None and self.api_key == _DEFAULT_KEY and "domain" not in self.options:
            raise SandboxRefusedError(
                "there is no sandbox server to talk to: pass api_url or set E2B_API_URL"
            )
        check_process()
        urls = {"api_url": self.api_url, "sandbox_url": self.sandbox_url}
        return {
            **self.options,
            "api_key": self.api_key,
            "debug": False,  # E2B_DEBUG would turn create and kill into no-ops
            "request_timeout": self.request_timeout,
            "retries": _SDK_RETRIES,
            **{name: url for name, url in urls.items() if url is not None},
            **changed,
        }

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything that decides what a new sandbox is like; `AgentEnv` documents the arguments."""

    connection: Connection
    template: str
    run: str
    sandbox_timeout_s: float = 300.0
    command_timeout_s: float = 120.0
    on_timeout: OnTimeout = "pause"
    envs: Mapping[str, str] = field(default_factory=dict[str, str])
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    setup_commands: tuple[str, ...] = ()
    setup_errors: SetupErrors = "raise"
    capacity_timeout_s: float = 30.0
    ready_timeout_s: float = 15.0
    max_concurrent_creates: int = 32
    queue_timeout_s: float = 600.0
    create_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    code_interpreter: bool = False

    def __post_init__(self) -> None:
        """Refuse what can never work.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is impossible.
        """
        if not _is_text(self.template):
            raise ValueError(
                f"template must name a template of the server, found {self.template!r}: build one "
                "first, for instance with `aenv pull ubuntu:22.04 --name my-env`"
            )
        for name, seconds in (
            ("sandbox_timeout", self.sandbox_timeout_s),
            ("command_timeout", self.command_timeout_s),
            ("queue_timeout_s", self.queue_timeout_s),
        ):
            if not _is_number(seconds) or not seconds > 0:
                raise ValueError(f"{name} must be above 0 seconds, found {seconds!r}")
        for name in ("capacity_timeout_s", "ready_timeout_s"):
            seconds = getattr(self, name)
            if not _is_number(seconds) or seconds < 0:
                raise ValueError(f"{name} must be 0 or more seconds, found {seconds!r}")
        if self.max_concurrent_creates < 1:
            raise ValueError(
                f"max_concurrent_creates must be at least 1, found {self.max_concurrent_creates!r}"
            )
        for name, choices in (("on_timeout", OnTimeout), ("setup_errors", SetupErrors)):
            known = get_args(choices)
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be {' or '.join(map(repr, known))}, found {getattr(self, name)!r}"
                )
        for name, mapping in (("sandbox_envs", self.envs), ("metadata", self.metadata)):
            for key, value in mapping.items():
                if not (isinstance(key, str) and isinstance(value, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"{name} must map text to text, found {key!r}: {value!r}")
        taken = [key for key in self.metadata if key.startswith(PREFIX)]
        if taken:
            raise ValueError(f"metadata keys beginning with {PREFIX!r} are taken, found {taken}")
        for command in self.setup_commands:
            if not _is_text(command):
                raise TypeError(f"setup_commands must be non-empty texts, found {command!r}")


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
    return host.startswith(("api.e2b.", "api.e2b-"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
