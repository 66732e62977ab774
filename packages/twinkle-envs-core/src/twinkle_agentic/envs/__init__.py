"""Execution environments for agentic reinforcement learning.

Core owns this package; every other `twinkle-envs-*` distribution adds one sub-package to it. The
names below are imported on first use, so importing the package pulls in no client library.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import TYPE_CHECKING

# The guests of an editable install live in other source trees; find them all.
__path__ = pkgutil.extend_path(__path__, __name__)

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv import AgentEnv, SandboxPool
    from twinkle_agentic.envs.base import Env, StepResult
    from twinkle_agentic.envs.env_tool import EnvTool
    from twinkle_agentic.envs.errors import ErrorKind, TwinkleEnvError
    from twinkle_agentic.envs.openenv import EnvPool, EnvPoolAdapter, OpenEnv, OpenEnvClient

__all__ = [
    "AgentEnv",
    "Env",
    "EnvPool",
    "EnvPoolAdapter",
    "EnvTool",
    "ErrorKind",
    "OpenEnv",
    "OpenEnvClient",
    "SandboxPool",
    "StepResult",
    "TwinkleEnvError",
]

_AGENTENV = ("twinkle_agentic.envs.agentenv", "twinkle-envs-agentenv")
_OPENENV = ("twinkle_agentic.envs.openenv", "twinkle-envs-openenv")

# Public name -> (module that has it, distribution that ships the module).
_EXPORTS = {
    "AgentEnv": _AGENTENV,
    "Env": ("twinkle_agentic.envs.base", "twinkle-envs-core"),
    "EnvPool": _OPENENV,
    "EnvPoolAdapter": _OPENENV,
    "EnvTool": ("twinkle_agentic.envs.env_tool", "twinkle-envs-core"),
    "ErrorKind": ("twinkle_agentic.envs.errors", "twinkle-envs-core"),
    "OpenEnv": _OPENENV,
    "OpenEnvClient": _OPENENV,
    "SandboxPool": _AGENTENV,
    "StepResult": ("twinkle_agentic.envs.base", "twinkle-envs-core"),
    "TwinkleEnvError": ("twinkle_agentic.envs.errors", "twinkle-envs-core"),
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, distribution = _EXPORTS[name]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # the module is there, one of its own imports is not
            raise
        raise ModuleNotFoundError(
            f"{name} needs the {distribution} distribution, which is not installed: "
            f'run "pip install {distribution}"',
            name=module,
        ) from None
    try:
        value = getattr(found, name)
    except AttributeError as error:
        raise ImportError(
            f"{name} is not in the installed {distribution}, which is older than this core: "
            f'run "pip install --upgrade {distribution}"',
            name=module,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    installed = [name for name, (module, _) in _EXPORTS.items() if importlib.util.find_spec(module)]
    return sorted({*globals(), *installed})
