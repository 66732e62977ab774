"""The ASGI application: `uvicorn openenv_server.app:app --workers N`.

Settings come from environment variables (`openenv_server.settings`); a bad one ends the process
with its name before anything is served.
"""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI

from openenv_server.concurrent import concurrent_app
from openenv_server.environment import CodingEnvironment
from openenv_server.memory import return_large_blocks
from openenv_server.settings import Settings, SettingsError
from openenv_server.wire import CodeAction, CodeObservation, CodeState

__all__ = ["app", "make_app"]


def make_app(settings: Settings | None = None) -> FastAPI:
    """Make the application of the coding environment.

    Args:
        settings: Read from the environment variables when not given.

    Raises:
        SettingsError: An environment variable has a value that cannot be used.
    """
    chosen = Settings.from_environ() if settings is None else settings
    return concurrent_app(
        partial(CodingEnvironment, chosen),
        CodeAction,
        CodeObservation,
        CodeState,
        name="coding_env",
        max_concurrent_envs=chosen.max_concurrent_envs,
        allowed_hosts=chosen.allowed_hosts,
    )


return_large_blocks()
try:
    app: FastAPI = make_app()
except SettingsError as error:
    raise SystemExit(f"openenv_server: {error}") from None
