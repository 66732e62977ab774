"""Serves any OpenEnv environment to concurrent sessions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from starlette.applications import Starlette

from openenv_server._admission import Admission, AdmissionQueue
from openenv_server.serving import Served, class_of, make_asgi

__all__ = ["concurrent_app"]


def concurrent_app(
    env: Callable[[], Any],
    action_cls: type[Any],
    observation_cls: type[Any],
    state_cls: type[Any],
    *,
    name: str,
    max_concurrent_envs: int,
    max_queue: int = 1_000,
    queue_timeout_s: float = 30.0,
    idle_timeout_s: float = 3_600.0,
    tokens: Iterable[str] = (),
    allowed_hosts: Iterable[str] = (),
    only_loopback: bool = False,
    lifespan: Callable[[], contextlib.AbstractAsyncContextManager[Any]] | None = None,
    admission: Admission | None = None,
) -> Starlette:
    """Make the ASGI application that serves an environment over the OpenEnv protocol.

    The environment is used by its methods alone (`reset`, `step`, `state`, `close`, or their
    twins `reset_async` and so on): `openenv` need not be installed unless it imports that.

    Args:
        env: Environment class or a function that makes one, called once per session. Where it has
            `abort()`, that is called from another thread when the client goes away in the middle of
            a step, and must end the step; else the step runs to its end and holds its slot.
        action_cls: Its action type, a pydantic model; so are the next two.
        observation_cls: Its observation type.
        state_cls: Its state type.
        name: Name of the environment.
        max_concurrent_envs: Sessions at a time, in each process that runs the application.
        max_queue: Clients that may wait for one.
        queue_timeout_s: Seconds a client waits before it is refused with `CAPACITY_REACHED`.
        idle_timeout_s: Seconds without a request after which a session is closed; 0 is no limit.
        tokens: Secrets of which a client must send one; empty asks for none.
        allowed_hosts: Host names under which pages in a browser and proxies on this machine may
            use a server without tokens, besides its own.
        only_loopback: Without tokens, refuse connections to other addresses than loopback ones.
        lifespan: Entered before the first request and left after the last.
        admission: Who is let in, in place of the three limits above.

    Raises:
        ValueError: More than one session is asked for and the environment class does not have
            `SUPPORTS_CONCURRENT_SESSIONS = True`.
    """
    cls = class_of(env)
    if (
        max_concurrent_envs > 1
        and inspect.isclass(cls)
        and not getattr(cls, "SUPPORTS_CONCURRENT_SESSIONS", False)
    ):
        raise ValueError(
            f"max_concurrent_envs is {max_concurrent_envs} and {cls.__name__} does not say that "
            "its sessions keep apart: set SUPPORTS_CONCURRENT_SESSIONS = True where they do"
        )
    own = AdmissionQueue(
        limit=max_concurrent_envs, max_queue=max_queue, queue_timeout_s=queue_timeout_s
    )
    served = Served(
        env,
        action_cls,
        observation_cls,
        state_cls,
        name=name,
        admission=own if admission is None else admission,
        idle_timeout_s=idle_timeout_s,
    )
    return make_asgi(
        served,
        tokens=tuple(tokens),
        allowed_hosts=tuple(allowed_hosts),
        only_loopback=only_loopback,
        lifespan=lifespan,
    )
