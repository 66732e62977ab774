"""Plain data of one sandbox: what it is made from, what a command in it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from twinkle_agentic.envs.agentenv.connection import Connection
from twinkle_agentic.envs.agentenv.labels import PREFIX

__all__ = ["ExecResult", "OnTimeout", "SandboxSpec", "SetupErrors"]

OnTimeout = Literal["pause", "kill"]
SetupErrors = Literal["raise", "observe"]

_ARGUMENTS = {"sandbox_timeout_s": "sandbox_timeout", "command_timeout_s": "command_timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Everything that decides what a new sandbox is like.

    Attributes:
        connection: The server and the key.
        template: Name or id of the template, or a snapshot id.
        run: The run's label, by which `sweep` finds the sandbox.
        sandbox_timeout_s: Idle seconds until the server pauses or kills it.
        command_timeout_s: Seconds a setup command may take.
        on_timeout: What the server does then; `pause` asks for auto-resume as well.
        envs: Environment variables of every process in it.
        metadata: The user's own labels.
        setup_commands: Run in order before it is handed over.
        setup_errors: `raise` ends the sandbox when a setup command fails, `observe` goes on.
        capacity_timeout_s: Seconds a refusal for want of room, or a failure of the server, is
            waited out.
        ready_timeout_s: Seconds a new sandbox may take to answer its first request.
        max_concurrent_creates: Creations in flight at once, over all envs of the process with this
            server.
        queue_timeout_s: Seconds to wait for a place among them.
        create_options: Further arguments of the SDK's `Sandbox.create`.
    """

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

    def check(self) -> None:
        """Refuse what can never work.

        Raises:
            TypeError: A value has the wrong type.
            ValueError: A value is impossible.
        """
        if not isinstance(self.template, str) or not self.template:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"template must name a template of the server, found {self.template!r}: build one "
                "first, for instance with `aenv pull ubuntu:22.04 --name my-env`"
            )
        for name in ("sandbox_timeout_s", "command_timeout_s", "queue_timeout_s"):
            value = getattr(self, name)
            if not _is_number(value) or not value > 0:
                raise ValueError(
                    f"{_ARGUMENTS.get(name, name)} must be above 0 seconds, found {value!r}"
                )
        for name in ("capacity_timeout_s", "ready_timeout_s"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise ValueError(f"{name} must be 0 or more seconds, found {value!r}")
        if self.max_concurrent_creates < 1:
            raise ValueError(
                f"max_concurrent_creates must be at least 1, found {self.max_concurrent_creates!r}"
            )
        if self.on_timeout not in get_args(OnTimeout):
            raise ValueError(f"on_timeout must be 'pause' or 'kill', found {self.on_timeout!r}")
        if self.setup_errors not in get_args(SetupErrors):
            raise ValueError(
                f"setup_errors must be 'raise' or 'observe', found {self.setup_errors!r}"
            )
        for name, mapping in (("sandbox_envs", self.envs), ("metadata", self.metadata)):
            for key, value in mapping.items():
                if not isinstance(key, str) or not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(f"{name} must map text to text, found {key!r}: {value!r}")
        taken = [key for key in self.metadata if key.startswith(PREFIX)]
        if taken:
            raise ValueError(f"metadata keys beginning with {PREFIX!r} are taken, found {taken}")
        for command in self.setup_commands:
            if not isinstance(command, str) or not command:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"setup_commands must be non-empty texts, found {command!r}")

    def key(self) -> str:
        """Name what two sandboxes must have in common to be exchangeable."""
        return repr(
            (
                self.connection.identity(),
                self.template,
                self.run,
                self.sandbox_timeout_s,
                self.on_timeout,
                sorted(self.envs.items()),
                sorted(self.metadata.items()),
                self.setup_commands,
                self.setup_errors,
                sorted((name, repr(value)) for name, value in self.create_options.items()),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command did.

    Attributes:
        stdout: Its standard output as text (bytes that are no UTF-8 are U+FFFD). Of long output
            head and tail are kept, with a line between them that says how much is missing.
        stderr: Its standard error, likewise.
        exit_code: `None` where the command was killed at its time limit; -1 where another signal
            ended it.
        timed_out: It ran into its time limit and was killed, with every process it had started.
        duration_s: Wall time, the round trip included.
        cut_chars: Characters missing from `stdout` and `stderr` together.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    cut_chars: int = 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
