"""Opens an OpenEnv environment to concurrent sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI

from openenv_server.browsers import BrowserGuard
from openenv_server.lean import Action, Environment, Observation, State, create_app

__all__ = ["concurrent_app"]


def concurrent_app(
    env: Callable[[], Environment[Any, Any, Any]],
    action_cls: type[Action],
    observation_cls: type[Observation],
    state_cls: type[State],
    *,
    name: str,
    max_concurrent_envs: int,
    allowed_hosts: Iterable[str] = (),
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
        allowed_hosts: Host names under which pages in a browser and proxies on this machine may
            use the server, besides its own; see `browsers.BrowserGuard`.

    Raises:
        openenv.core.env_server.exceptions.ConcurrencyConfigurationError: More than one session
            is asked for and the class does not have `SUPPORTS_CONCURRENT_SESSIONS = True`.
    """
    # No session_timeout: OpenEnv's reaper closes the environment under a session that is idle but
    # connected. A dead client is found by WebSocket pings.
    app = create_app(
        env=env,
        action_cls=action_cls,
        observation_cls=observation_cls,
        state_cls=state_cls,
        env_name=name,
        max_concurrent_envs=max_concurrent_envs,
    )
    app.add_middleware(BrowserGuard, allowed_hosts=tuple(allowed_hosts))
    return app
