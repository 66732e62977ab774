"""What can be set, from where it is read, and what is refused.

Every setting is an environment variable, so that it reaches each worker process; the command line
sets the same variables. A bad value stops the server before it serves anything.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EXECUTOR_NAMES", "Settings", "SettingsError"]

EXECUTOR_NAMES = ("strict", "stock")
"""Values of `CODE_EXECUTOR`; `openenv_server.executors` makes them."""

_DEFAULT_IMPORTS = (
    "abc",
    "bisect",
    "collections.abc",
    "copy",
    "dataclasses",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "json",
)


class SettingsError(ValueError):
    """A setting has a value the server cannot run with. `setting` is its name."""

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, str]]:
        return type(self), (self.setting, str(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one server process.

    Attributes:
        max_concurrent_envs: Sessions of one worker process; one more is refused with
            `CAPACITY_REACHED`. The whole server holds workers times this. 1 to 100,000.
        executor: `strict` runs code as CPython would or fails the step, so far as the two have been
            compared; `stock` is the interpreter of OpenEnv's `coding_env` as it is, wrong values
            included.
        step_timeout_s: Seconds of wall time for one step, 0.1 to 86,400. It ends code that the
            interpreter is evaluating; one long call into C runs to its end.
        max_output_chars: Characters kept of stdout and of stderr, each: head and tail, with a
            line that says how much is missing. 1,000 to 50,000,000.
        max_code_chars: A longer piece of code is a failed step. 1,000 to 50,000,000.
        extra_imports: Modules the code may import besides the interpreter's own list. State they
            keep for the whole process is shared by all sessions.
        allowed_hosts: Host names, without port, under which pages in a browser and proxies on this
            machine may use the server, besides its own (`browsers.py`).

    Raises:
        SettingsError: A value is out of range; the message names the environment variable.
    """

    max_concurrent_envs: int = 64
    executor: str = "strict"
    step_timeout_s: float = 30.0
    max_output_chars: int = 1_000_000
    max_code_chars: int = 4_000_000
    extra_imports: tuple[str, ...] = _DEFAULT_IMPORTS
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_int("MAX_CONCURRENT_ENVS", self.max_concurrent_envs, 1, 100_000)
        _check_int("CODE_MAX_OUTPUT_CHARS", self.max_output_chars, 1_000, 50_000_000)
        _check_int("CODE_MAX_CODE_CHARS", self.max_code_chars, 1_000, 50_000_000)
        if not 0.1 <= self.step_timeout_s <= 86_400:  # also refuses NaN
            raise SettingsError(
                "CODE_STEP_TIMEOUT_S",
                f"CODE_STEP_TIMEOUT_S is {self.step_timeout_s!r}: set it to a number of seconds "
                "from 0.1 to 86400",
            )
        if self.executor not in EXECUTOR_NAMES:
            raise SettingsError(
                "CODE_EXECUTOR",
                f"CODE_EXECUTOR is {self.executor!r}: set it to one of {', '.join(EXECUTOR_NAMES)}",
            )
        for host in self.allowed_hosts:
            if not host or any(character in "/:@* " for character in host):
                raise SettingsError(
                    "ALLOWED_HOSTS",
                    f"ALLOWED_HOSTS has {host!r}: set it to host names, without scheme and port, "
                    "with commas between them",
                )
        for module in self.extra_imports:
            if not all(part.isidentifier() for part in module.split(".")):
                raise SettingsError(
                    "CODE_EXTRA_IMPORTS",
                    f"CODE_EXTRA_IMPORTS has {module!r}: set it to module names with commas "
                    "between them",
                )
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                raise SettingsError(
                    "CODE_EXTRA_IMPORTS",
                    f"CODE_EXTRA_IMPORTS has {module!r}, which is not installed: install it or "
                    "take it out",
                )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from environment variables; a variable that is not set is the default.

        Args:
            environ: Variables to read instead of `os.environ`.

        Raises:
            SettingsError: A variable is empty, no number, or out of range.
        """
        env = os.environ if environ is None else environ
        default = cls()
        return cls(
            max_concurrent_envs=_int(env, "MAX_CONCURRENT_ENVS", default.max_concurrent_envs),
            executor=env.get("CODE_EXECUTOR", default.executor),
            step_timeout_s=_float(env, "CODE_STEP_TIMEOUT_S", default.step_timeout_s),
            max_output_chars=_int(env, "CODE_MAX_OUTPUT_CHARS", default.max_output_chars),
            max_code_chars=_int(env, "CODE_MAX_CODE_CHARS", default.max_code_chars),
            extra_imports=_list(env, "CODE_EXTRA_IMPORTS", default.extra_imports),
            allowed_hosts=_list(env, "ALLOWED_HOSTS", default.allowed_hosts),
        )

    def to_environ(self) -> dict[str, str]:
        """Give the variables from which `from_environ` makes equal settings."""
        return {
            "MAX_CONCURRENT_ENVS": str(self.max_concurrent_envs),
            "CODE_EXECUTOR": self.executor,
            "CODE_STEP_TIMEOUT_S": repr(self.step_timeout_s),
            "CODE_MAX_OUTPUT_CHARS": str(self.max_output_chars),
            "CODE_MAX_CODE_CHARS": str(self.max_code_chars),
            "CODE_EXTRA_IMPORTS": ",".join(self.extra_imports),
            "ALLOWED_HOSTS": ",".join(self.allowed_hosts),
        }

    @property
    def max_message_bytes(self) -> int:
        """Largest WebSocket message to accept: the longest code there may be, JSON-escaped."""
        return max(32 * 2**20, 6 * self.max_code_chars + 2**20)


def _check_int(setting: str, value: object, low: int, high: int) -> None:
    # bool is an int: MAX_CONCURRENT_ENVS=True would be 1
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SettingsError(
            setting, f"{setting} is {value!r}: set it to a whole number from {low} to {high}"
        )


def _int(env: Mapping[str, str], setting: str, default: int) -> int:
    found = env.get(setting)
    if found is None:
        return default
    try:
        return int(found)
    except ValueError:
        raise SettingsError(setting, f"{setting} is {found!r}: set it to a whole number") from None


def _list(env: Mapping[str, str], setting: str, default: tuple[str, ...]) -> tuple[str, ...]:
    found = env.get(setting)
    if found is None:
        return default
    return tuple(part.strip() for part in found.split(",") if part.strip())


def _float(env: Mapping[str, str], setting: str, default: float) -> float:
    found = env.get(setting)
    if found is None:
        return default
    try:
        value = float(found)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise SettingsError(setting, f"{setting} is {found!r}: set it to a number")
    return value
