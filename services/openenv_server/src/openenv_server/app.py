"""The ASGI application: `uvicorn openenv_server.app:app`.

Settings come from environment variables (`openenv_server.settings`); a bad one ends the process
with its name before anything is served. Each worker of an ASGI server has its own sessions and its
own queue; `twinkle-openenv-server --workers` shares them.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING, Any

from openenv_server._admission import Admission
from openenv_server.coding_types import CodeAction, CodeObservation, CodeState
from openenv_server.concurrent import concurrent_app
from openenv_server.environment import CodingEnvironment
from openenv_server.packages import MissingPackageError
from openenv_server.session import Sessions
from openenv_server.settings import Settings, SettingsError
from twinkle_isolation import IsolationUnavailableError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    app: Starlette

__all__ = ["app", "make_app"]


def make_app(settings: Settings | None = None, *, admission: Admission | None = None) -> Starlette:
    """Make the application of the coding environment.

    Args:
        settings: Read from the environment variables when not given.
        admission: Who is let in, where another process decides that.

    Raises:
        SettingsError: An environment variable has a value that cannot be used.
    """
    chosen = Settings.load() if settings is None else settings
    sessions = Sessions(chosen.limits)
    return concurrent_app(
        partial(CodingEnvironment, sessions=sessions),
        CodeAction,
        CodeObservation,
        CodeState,
        name="coding_env",
        max_concurrent_envs=chosen.max_concurrent_envs,
        max_queue=chosen.max_queue,
        queue_timeout_s=chosen.queue_timeout_s,
        idle_timeout_s=chosen.idle_timeout_s,
        tokens=chosen.token,
        allowed_hosts=chosen.allowed_hosts,
        only_loopback=not chosen.insecure,
        lifespan=partial(_lifespan, sessions),
        admission=admission,
    )


@contextlib.asynccontextmanager
async def _lifespan(sessions: Sessions) -> AsyncGenerator[None]:
    try:
        await sessions.start()
    except (IsolationUnavailableError, MissingPackageError) as error:
        raise SystemExit(f"openenv_server: {error}") from None
    try:
        yield
    finally:
        await sessions.close()


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        made = make_app()
    except SettingsError as error:
        raise SystemExit(f"openenv_server: {error}") from None
    globals()["app"] = made
    return made
