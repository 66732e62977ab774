"""What can be set: each option of the command line, declared once.

A field's name is the option (`max_queue` is `--max-queue`), its description is the help, its alias
is the environment variable. The command line and `uvicorn openenv_server.app:app` read the same
variables. A bad value stops the server before it serves anything.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from openenv_server.limits import SessionLimits
from openenv_server.packages import find_package

__all__ = ["Settings", "SettingsError", "variable_of"]

_PREFIX = "OPENENV_SERVER_"


class SettingsError(ValueError):
    """A setting has a value the server cannot run with. `setting` is its environment variable."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, str]]:
        return type(self), (self.setting, str(self))


def _split(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _host_names(hosts: tuple[str, ...]) -> tuple[str, ...]:
    for host in hosts:
        if not host or any(character in "/:@* " for character in host):
            raise ValueError("set it to host names, without scheme and port, with commas between")
    return hosts


def _modules(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError("set it to module names with commas between")
    return names


def _distributions(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        find_package(name)
    return names


def _tokens(tokens: tuple[str, ...]) -> tuple[str, ...]:
    if any(len(token) < 8 or not token.isascii() or " " in token for token in tokens):
        raise ValueError("set it to a secret of at least 8 ASCII characters without spaces")
    return tokens


_Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Settings of one server. Values come from the arguments, else from environment variables.

    `Settings.load(...)` reports a bad value as a `SettingsError`; the constructor raises pydantic's
    `ValidationError`.
    """

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="ignore", validate_by_name=True
    )

    # Where it listens and who may use it

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. The server runs the code it is sent: any address but a "
        "loopback one needs `--token`, or `--insecure`.",
    )
    port: int = Field(
        default=8000, ge=0, le=65_535, description="Port; 0 takes a free one and prints it."
    )
    token: Annotated[_Words, AfterValidator(_tokens)] = Field(
        default=(),
        repr=False,
        description="Secret that clients send as `Authorization: Bearer ...`; several with commas "
        "between. Use the variable rather than the option: other users of the machine see options "
        "in the process list.",
    )
    insecure: bool = Field(
        default=False, description="Listen on an address other than loopback without a token."
    )
    allowed_hosts: Annotated[_Words, AfterValidator(_host_names)] = Field(
        default=(),
        validation_alias="ALLOWED_HOSTS",
        description="Host names, with commas between, under which pages in a browser and proxies "
        "on this machine may use a server without a token, besides its own.",
    )

    # How many, and who waits

    workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Processes that serve connections. They share the sessions and the queue: the "
        "limits below are those of the whole server.",
    )
    max_concurrent_envs: int = Field(
        default=64,
        ge=1,
        le=100_000,
        validation_alias="MAX_CONCURRENT_ENVS",
        description="Sessions at a time. Further clients wait in the queue.",
    )
    max_queue: int = Field(
        default=1_000,
        ge=0,
        le=100_000,
        description="Clients that may wait for a session; one more is refused with "
        "CAPACITY_REACHED. 0 refuses at once when the server is full.",
    )
    queue_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=86_400,
        description="Seconds a client waits before it is refused with CAPACITY_REACHED. Keep it "
        "below the message timeout of the clients (60 s in OpenEnv's, 120 s in OpenEnvClient).",
    )
    idle_timeout_s: float = Field(
        default=3_600.0,
        ge=0,
        le=31_536_000,
        description="Seconds without a request after which a session is closed; 0 is no limit.",
    )
    ping_interval_s: float = Field(
        default=20.0,
        ge=0.5,
        le=3_600,
        description="Seconds between two WebSocket pings to each client.",
    )
    ping_timeout_s: float = Field(
        default=20.0,
        ge=0.5,
        le=3_600,
        description="Seconds to wait for the pong. A client whose machine is off gives its slot "
        "back after interval + timeout; one whose process ended does so at once.",
    )
    drain_timeout_s: float = Field(
        default=20.0,
        ge=0,
        le=86_400,
        description="SIGTERM takes no new sessions, gives the running ones this many seconds, and "
        "ends the server at most 5 s later. SIGINT (Ctrl-C) does not wait for them.",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        default="info", description="critical, error, warning, info or debug."
    )

    # What a session may do

    step_timeout_s: float = Field(
        default=30.0,
        ge=0.1,
        le=86_400,
        validation_alias="CODE_STEP_TIMEOUT_S",
        description="Seconds of wall time for one step.",
    )
    max_output_chars: int = Field(
        default=1_000_000,
        ge=1_000,
        le=50_000_000,
        validation_alias="CODE_MAX_OUTPUT_CHARS",
        description="Characters kept of stdout and of stderr, each: head and tail.",
    )
    max_code_chars: int = Field(
        default=4_000_000,
        ge=1_000,
        le=50_000_000,
        validation_alias="CODE_MAX_CODE_CHARS",
        description="Longer code is a failed step; the session lives.",
    )
    step_cpu_s: float = Field(
        default=60.0,
        ge=0.1,
        le=10_000_000,
        validation_alias="CODE_STEP_CPU_S",
        description="Seconds of processor time for one step, of all processes of the session.",
    )
    memory_mb: int = Field(
        default=512,
        ge=64,
        le=1_000_000,
        validation_alias="CODE_MEMORY_MB",
        description="Memory of a session in MiB.",
    )
    processes: int = Field(
        default=64,
        ge=4,
        le=30_000,
        validation_alias="CODE_PROCESSES",
        description="Processes and threads of a session.",
    )
    disk_mb: int = Field(
        default=64,
        ge=1,
        le=1_000_000,
        validation_alias="CODE_DISK_MB",
        description="Files of a session in MiB; they are kept in memory.",
    )
    packages: Annotated[_Words, AfterValidator(_distributions)] = Field(
        default=(),
        validation_alias="CODE_PACKAGES",
        description="Installed packages the code may import, with what they require; commas "
        "between.",
    )
    preload: Annotated[_Words, AfterValidator(_modules)] = Field(
        default=(),
        validation_alias="CODE_PRELOAD",
        description="Modules imported once, whose memory all sessions share; commas between.",
    )
    isolation: Literal["bubblewrap", "process"] = Field(
        default="bubblewrap",
        validation_alias="CODE_ISOLATION",
        description="`bubblewrap`: namespaces, or the server does not start. `process`: limits "
        "only; the code then has this server's network and can read what it may.",
    )
    network: bool = Field(
        default=False,
        validation_alias="CODE_NETWORK",
        description="Give the code this server's network.",
    )
    spares: int = Field(
        default=4,
        ge=0,
        le=1_000,
        validation_alias="CODE_SPARES",
        description="Sessions that each worker keeps ready.",
    )

    @model_validator(mode="after")
    def _require_token_off_loopback(self) -> Self:
        if not self.is_loopback and not self.token and not self.insecure:
            raise ValueError(
                f"{_PREFIX}HOST is {self.host!r}, which other machines reach, and the server runs "
                f"the code it is sent: set a token ({_PREFIX}TOKEN or --token), or --insecure "
                "where everybody who reaches it may run code here"
            )
        return self

    @classmethod
    def load(cls, **given: Any) -> Settings:
        """Make settings from arguments and environment variables.

        Raises:
            SettingsError: The first value that is not usable, in one line.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            raise _settings_error(error) from None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches `host`."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")

    @property
    def limits(self) -> SessionLimits:
        """The limits of a session."""
        names = {field.name for field in dataclasses.fields(SessionLimits)}
        return SessionLimits(**self.model_dump(include=names))

    @property
    def max_message_bytes(self) -> int:
        """Largest WebSocket message to accept: the longest code there may be, JSON-escaped."""
        return max(32 * 2**20, 6 * self.max_code_chars + 2**20)


def variable_of(name: str) -> str:
    """Return the environment variable of a field."""
    alias = Settings.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else _PREFIX + name.upper()


def _settings_error(error: ValidationError) -> SettingsError:
    first = error.errors(include_url=False, include_context=False)[0]
    said = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:  # of more than one field
        return SettingsError(said.partition(" ")[0], said)
    # The place is the field's name where the value was an argument, else the variable.
    place = str(first["loc"][0])
    names = {variable_of(name): name for name in Settings.model_fields}
    name = names.get(place, place)
    field = Settings.model_fields[name]
    wanted = said if first["type"] == "value_error" else f"set it to {_wanted(field)}"
    found = first["input"]
    option = f"--{name.replace('_', '-')}"
    text = f"{variable_of(name)} is {found!r}: {wanted} ({option})"
    return SettingsError(variable_of(name), text)


def _wanted(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if kind is bool:
        return "true or false"
    if kind not in (int, float):
        return "one of " + ", ".join(getattr(kind, "__args__", ()))
    limits = {type(limit).__name__: limit for limit in field.metadata}
    low, high = limits["Ge"].ge, limits["Le"].le
    noun = "a whole number" if kind is int else "a number"
    return f"{noun} from {low:g} to {high:g}" if kind is float else f"{noun} from {low} to {high}"
