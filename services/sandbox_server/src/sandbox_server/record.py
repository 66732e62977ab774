"""What the server knows of one sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from dataclasses import dataclass, field
from typing import Literal

from sandbox_server.envd.processes import RunningProcess
from sandbox_server.envd.watchers import Watcher
from sandbox_server.interpreter.contexts import ContextTable
from twinkle_isolation import ExecResult, GuestProcess, Sandbox

_SHELL = ("/bin/bash", "-l", "-c")
_CLOCK_SET_S = 1.0  # a wall clock that is further off was set, not slewed


@dataclass(eq=False, kw_only=True)
class SandboxRecord:
    """One sandbox with its lease.

    Attributes:
        lease_end: When the lease ends (`time.monotonic`, which nobody sets); a paused sandbox has
            its own, longer one.
        begun: When it started, likewise.
        started_at: When it started (`time.time`), for clients.
        auto_pause: At the end of the lease: pause instead of kill.
        auto_resume: A request to a paused sandbox resumes it.
        env: Environment of every program, from the template and the create request.
        cpu_sample: When the processor time was last asked for, and what it was, both in seconds.
        ending: Its lease is over and it is being paused or killed.
        lock: Held while the state changes.
    """

    sandbox_id: str
    template_id: str
    alias: str | None
    sandbox: Sandbox
    metadata: dict[str, str]
    env: dict[str, str]
    default_user: str
    default_cwd: str | None
    token: str | None
    timeout_s: float
    lease_end: float
    auto_pause: bool
    auto_resume: bool
    allow_internet: bool
    memory_bytes: int
    disk_bytes: int
    begun: float = field(default_factory=time.monotonic)
    started_at: float = field(default_factory=time.time)
    state: Literal["running", "paused"] = "running"
    processes: dict[int, RunningProcess] = field(default_factory=dict[int, RunningProcess])
    watchers: dict[str, Watcher] = field(default_factory=dict[str, Watcher])
    contexts: ContextTable = field(default_factory=ContextTable)
    cpu_sample: tuple[float, float] | None = None
    ending: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ends_at(self) -> float:
        """When the lease ends (`time.time`), the same each time unless that clock was set."""
        end = self.started_at + self.lease_end - self.begun
        now = time.time() + self.lease_end - time.monotonic()
        return end if abs(now - end) < _CLOCK_SET_S else now

    @property
    def traffic_token(self) -> str | None:
        """What lets requests to the code interpreter in, and nothing else of the sandbox."""
        if self.token is None:
            return None
        return hmac.new(self.token.encode(), b"traffic", hashlib.sha256).hexdigest()

    async def start_shell(self, command: str) -> GuestProcess:
        """Start a command line as the sandbox's user, in its directory, with its environment.

        Raises:
            GuestError: It could not be started.
            SandboxLostError: The sandbox has ended.
        """
        return await self.sandbox.start(
            [*_SHELL, command], env=self.env, cwd=self.default_cwd, user=self.default_user
        )

    async def run_shell(
        self, command: str, *, timeout_s: float, user: str | None = None
    ) -> ExecResult:
        """Run a command line to its end, by default as `start_shell` does.

        Raises:
            GuestError: It could not be started.
            SandboxLostError: The sandbox has ended.
        """
        return await self.sandbox.exec(
            [*_SHELL, command],
            env=self.env,
            cwd=self.default_cwd,
            user=user or self.default_user,
            timeout_s=timeout_s,
        )
