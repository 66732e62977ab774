"""A coding environment served over the OpenEnv protocol, with concurrent sessions.

Start it with `twinkle-openenv-server` or `uvicorn openenv_server.app:app`. Importing this package
loads neither `openenv` nor `coding_env`.
"""

from __future__ import annotations

from openenv_server.limits import Failure, SessionLimits
from openenv_server.session import CodeResult, CodeSession, Sessions
from openenv_server.settings import Settings, SettingsError

__all__ = [
    "CodeResult",
    "CodeSession",
    "Failure",
    "SessionLimits",
    "Sessions",
    "Settings",
    "SettingsError",
]
