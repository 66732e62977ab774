"""A coding environment served over the OpenEnv protocol, with concurrent sessions.

Start it with `twinkle-openenv-server` or `uvicorn openenv_server.app:app`. Importing this package
is light: `openenv` is loaded by `openenv_server.lean`, for the modules that need it.
"""

from __future__ import annotations

from openenv_server.executor import ExecResult, Executor
from openenv_server.settings import Settings, SettingsError

__all__ = ["ExecResult", "Executor", "Settings", "SettingsError"]
