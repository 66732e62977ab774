"""OpenEnv environments as `Env`: over a websocket, in process, and pooled on Ray.

The names are imported on first use: importing this package loads neither openenv, ray, httpx nor
websockets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_agentic.envs.openenv.client import OpenEnvClient
    from twinkle_agentic.envs.openenv.coding_task import CodingTaskEnv
    from twinkle_agentic.envs.openenv.embedded import OpenEnv
    from twinkle_agentic.envs.openenv.errors import ActionRefusedError, ServerError
    from twinkle_agentic.envs.openenv.pool import EnvPool, EnvPoolAdapter

__all__ = [
    "ActionRefusedError",
    "CodingTaskEnv",
    "EnvPool",
    "EnvPoolAdapter",
    "OpenEnv",
    "OpenEnvClient",
    "ServerError",
]

_MODULES = {
    "ActionRefusedError": "errors",
    "CodingTaskEnv": "coding_task",
    "EnvPool": "pool",
    "EnvPoolAdapter": "pool",
    "OpenEnv": "embedded",
    "OpenEnvClient": "client",
    "ServerError": "errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
