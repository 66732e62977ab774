"""The ASGI application: `uvicorn openenv_server.app:app --workers N`.

Settings come from environment variables (`openenv_server.settings`); a bad one ends the process
with its name before anything is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from openenv_server.lean import load_openenv
from openenv_server.settings import Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

__all__ = ["app", "concurrent_app", "make_app"]


def make_app(settings: Settings | None = None) -> FastAPI:
    """Make the application of the coding environment.

    Args:
        settings: Read from the environment variables when not given.

    Raises:
        SettingsError: An environment variable has a value that cannot be used.
    """
    chosen = Settings.from_environ() if settings is None else settings
    load_openenv()
    from openenv_server.environment import CodingEnvironment
    from openenv_server.wire import CodeAction, CodeObservation, CodeState

    def new_session() -> CodingEnvironment:
        return CodingEnvironment(chosen)

    return concurrent_app(
        new_session,
        CodeAction,
        CodeObservation,
        CodeState,
        name="coding_env",
        max_concurrent_envs=chosen.max_concurrent_envs,
    )


def concurrent_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Action],
    observation_cls: type[Observation],
    state_cls: type[State],
    *,
    name: str,
    max_concurrent_envs: int,
) -> FastAPI:
    """Serve any OpenEnv environment to many sessions at once.

    Args:
        env: Environment class or a function that makes one; called once per session, and once
            at the start when it is a function.
        action_cls: Its action type.
        observation_cls: Its observation type.
        state_cls: Its state type.
        name: Name the server gives itself.
        max_concurrent_envs: Sessions of one worker process.

    Raises:
        openenv.core.env_server.exceptions.ConcurrencyConfigurationError: More than one session
            is asked for and the class does not have `SUPPORTS_CONCURRENT_SESSIONS = True`.
    """
    from openenv.core.env_server.http_server import (
        create_app as create_openenv_app,  # pyright: ignore[reportUnknownVariableType]  # OpenEnv leaves its generics open
    )

    # No session_timeout: OpenEnv's reaper closes the environment under a session that is idle but
    # connected. A dead client is found by WebSocket pings.
    return create_openenv_app(
        env=env,
        action_cls=action_cls,
        observation_cls=observation_cls,
        state_cls=state_cls,
        env_name=name,
        max_concurrent_envs=max_concurrent_envs,
    )


def _app_or_exit() -> FastAPI:
    try:
        return make_app()
    except SettingsError as error:
        raise SystemExit(f"openenv_server: {error}") from None


app: FastAPI = _app_or_exit()
