"""What one server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from twinkle_isolation import IsolationMode, Limits

ENVD_VERSION = "0.5.15"  # the version AgentENV ships; clients choose their requests by it
ENVD_PORT = 49983
INTERPRETER_PORT = 49999  # of the code interpreter; both are answered by this server
BASE_NAMES = ("base", "code-interpreter-v1")  # what the SDKs ask for where a caller names none


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server.

    Attributes:
        api_key: Wanted in `X-API-Key` (or as a bearer token) by the control plane; `None` lets all
            requests in, and is refused with `network` and with isolation `process`.
        isolation: As `twinkle_isolation.Launcher`.
        shares: Directories of the host that sandboxes see read-only, `bin` in front of `PATH`.
        limits: What each sandbox may use; a template may ask for less memory.
        max_sandboxes: Running and paused ones together; more are refused with 429.
        total_memory_bytes: The most that all sandboxes together may be allowed to use, memory and
            files; more are refused with 429. `None` counts only what each may use, so that the sum
            may be more than the machine has.
        spares: Sandboxes kept ready beyond those that exist.
        max_templates: Templates and snapshots; more are refused with 429.
        max_snapshot_bytes: The longest snapshot file.
        default_timeout_s: Lifetime of a sandbox whose request names none (`POST /v2/sandboxes`).
        max_timeout_s: The longest lifetime a request may ask for, and the longest a sandbox is
            paused.
        max_lifetime_s: The longest that a sandbox lives, however often its lease is renewed.
        max_output_bytes: Output of one command; past it the command is killed.
        run_timeout_s: The longest that the code interpreter runs one piece of code.
        max_request_bytes: The longest JSON request.
        answer_timeout_s: How long a sandbox may take to answer a request or to be paused at the end
            of its lease; after that it is killed.
        network: Let sandboxes use the host's network. They reach the server and everything on the
            host's loopback then, so it is off by default.
        templates: Names that exist from the start and mean the bare host.
        data_dir: Where templates and snapshots are kept, in a directory of their own; a temporary
            one by default. One server at a time uses it.
        domain: Reported to clients; empty leaves it out.
    """

    api_key: str | None = None
    isolation: IsolationMode = "bubblewrap"
    shares: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    max_sandboxes: int = 256
    total_memory_bytes: int | None = None
    spares: int = 8
    max_templates: int = 1000
    max_snapshot_bytes: int = 2 << 30
    default_timeout_s: float = 300.0
    max_timeout_s: float = 24 * 3600.0
    max_lifetime_s: float = 7 * 24 * 3600.0
    max_output_bytes: int = 64 << 20
    run_timeout_s: float = 3600.0
    max_request_bytes: int = 8 << 20
    answer_timeout_s: float = 60.0
    network: bool = False
    templates: tuple[str, ...] = BASE_NAMES
    data_dir: Path | None = None
    domain: str = ""

    def __post_init__(self) -> None:
        if self.api_key is None and (self.network or self.isolation == "process"):
            asked = "network" if self.network else "isolation 'process'"
            raise ValueError(
                f"{asked} needs an API key: programs in sandboxes reach this server, and without a "
                "key each of them could read and kill all others"
            )
