"""Run untrusted processes in namespaces with limits, started from a warm forkserver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_isolation.errors import (
        GuestError,
        IsolationError,
        IsolationUnavailableError,
        SandboxLostError,
        SandboxStartError,
    )
    from twinkle_isolation.launcher import Launcher
    from twinkle_isolation.process import GuestProcess, Watch
    from twinkle_isolation.sandbox import Sandbox
    from twinkle_isolation.types import (
        DirEntry,
        ExecResult,
        IsolationInfo,
        IsolationMode,
        Limits,
        ProcessEnd,
        SandboxSpec,
        Usage,
        WatchEvent,
    )

__all__ = [
    "DirEntry",
    "ExecResult",
    "GuestError",
    "GuestProcess",
    "IsolationError",
    "IsolationInfo",
    "IsolationMode",
    "IsolationUnavailableError",
    "Launcher",
    "Limits",
    "ProcessEnd",
    "Sandbox",
    "SandboxLostError",
    "SandboxSpec",
    "SandboxStartError",
    "Usage",
    "Watch",
    "WatchEvent",
]

_HOMES = {
    "errors": (
        "GuestError",
        "IsolationError",
        "IsolationUnavailableError",
        "SandboxLostError",
        "SandboxStartError",
    ),
    "launcher": ("Launcher",),
    "process": ("GuestProcess", "Watch"),
    "sandbox": ("Sandbox",),
}


def __getattr__(name: str) -> Any:
    # The zygote imports this package too, and wants none of the host's modules.
    if name not in __all__:
        raise AttributeError(f"module 'twinkle_isolation' has no attribute {name!r}")
    from importlib import import_module

    module = next((home for home, names in _HOMES.items() if name in names), "types")
    return getattr(import_module(f"twinkle_isolation.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
