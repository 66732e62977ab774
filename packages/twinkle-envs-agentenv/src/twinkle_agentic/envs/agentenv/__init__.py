"""AgentENV and other servers that speak the E2B protocol: one sandbox per episode.

The names below are imported on first use; the `e2b` SDK is imported by the first `reset`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv._env import AgentEnv
    from twinkle_agentic.envs.agentenv._output import CommandOutput, ExecResult
    from twinkle_agentic.envs.agentenv._pool import PoolStats, SandboxPool
    from twinkle_agentic.envs.agentenv._sweep import SweepReport, sweep
    from twinkle_agentic.envs.agentenv.errors import (
        CommandBrokenError,
        SandboxRefusedError,
        SandboxSetupError,
        ToolFaultError,
    )

__all__ = [
    "AgentEnv",
    "CommandBrokenError",
    "CommandOutput",
    "ExecResult",
    "PoolStats",
    "SandboxPool",
    "SandboxRefusedError",
    "SandboxSetupError",
    "SweepReport",
    "ToolFaultError",
    "sweep",
]

_MODULES = {
    "_env": ("AgentEnv",),
    "_output": ("CommandOutput", "ExecResult"),
    "_pool": ("PoolStats", "SandboxPool"),
    "_sweep": ("SweepReport", "sweep"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((key for key, names in _MODULES.items() if name in names), "errors")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
