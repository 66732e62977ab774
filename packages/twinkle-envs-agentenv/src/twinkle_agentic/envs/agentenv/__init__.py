"""AgentENV and other servers that speak the E2B protocol: one sandbox per episode.

The names below are imported on first use; the `e2b` SDK is imported by the first `reset`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv.env import AgentEnv
    from twinkle_agentic.envs.agentenv.errors import (
        CommandBrokenError,
        SandboxRefusedError,
        SandboxSetupError,
        ToolFaultError,
    )
    from twinkle_agentic.envs.agentenv.pool import SandboxPool
    from twinkle_agentic.envs.agentenv.types import ExecResult

__all__ = [
    "AgentEnv",
    "CommandBrokenError",
    "ExecResult",
    "SandboxPool",
    "SandboxRefusedError",
    "SandboxSetupError",
    "ToolFaultError",
]

_MODULES = {
    "AgentEnv": "env",
    "CommandBrokenError": "errors",
    "ExecResult": "types",
    "SandboxPool": "pool",
    "SandboxRefusedError": "errors",
    "SandboxSetupError": "errors",
    "ToolFaultError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
