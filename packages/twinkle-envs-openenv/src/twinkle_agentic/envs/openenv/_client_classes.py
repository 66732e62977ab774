"""Which client class a connection uses: looked for once per process, however many clients ask.

Coroutines of the background loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.openenv._config import CONNECTION_KWARGS
from twinkle_agentic.envs.openenv._importing import is_importable, load_object

__all__ = ["Resolved", "make_client", "resolve_client_class"]

logger = logging.getLogger(__name__)

_Key = tuple[str | None, Any]
_resolved: dict[_Key, asyncio.Task[Resolved]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What was found.

    Attributes:
        client_cls: The class; `None` where plain dicts are to be used.
        action_cls: The Action it is declared for, if it is.
        observation_cls: The Observation it is declared for, if it is.
        note: Why plain dicts are used.
    """

    client_cls: Any = None
    action_cls: Any = None
    observation_cls: Any = None
    note: str = ""


async def resolve_client_class(env_name: str | None, env_cls: Any) -> Resolved:
    """Find the client class of a package, or load the one that was named.

    Raises:
        ImportError: `env_cls` names nothing that can be imported.
        TypeError: It is no client class.
    """
    if env_name is not None:
        missing = [name for name in (env_name, "openenv") if not is_importable(name)]
        if missing:
            return Resolved(note=f"{missing[0]} is not installed here: plain dicts are used")
    key: _Key = (env_name, env_cls)
    task = _resolved.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        # OpenEnv takes seconds to import.
        task = _resolved[key] = asyncio.ensure_future(run_blocking(_find, env_name, env_cls))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


def make_client(
    client_cls: Any, settings: Mapping[str, Any], client_kwargs: Mapping[str, Any]
) -> Any:
    """Make an instance, which is never connected.

    Args:
        client_cls: The client class.
        settings: Passed where its constructor has such a parameter: some have one of their own.
        client_kwargs: Passed; but for those that count for our own connection, which are like
            `settings`.

    Raises:
        ValueError: It cannot be made; the message has the reason.
    """
    try:
        parameters = inspect.signature(client_cls).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        arguments = {
            name: value
            for name, value in {**settings, **client_kwargs}.items()
            if takes_any
            or name in parameters
            or (name in client_kwargs and name not in CONNECTION_KWARGS)
        }
        return client_cls(**arguments)
    except Exception as error:
        raise ValueError(
            f"{client_cls.__name__} cannot be made with client_kwargs={dict(client_kwargs)!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _find(env_name: str | None, env_cls: Any) -> Resolved:
    # Of no use without an installed package.
    from twinkle_agentic.envs.openenv._discovery import classes_of_client, find_client_class

    if env_name is not None:
        try:
            found = classes_of_client(find_client_class(env_name))
        except Exception as error:  # the package is there, but not fit for this machine
            note = f"{env_name} is installed, but plain dicts are used: {error}"
            logger.warning("%s", note)
            return Resolved(note=note)
    else:
        found = classes_of_client(_named(env_cls))
    return Resolved(
        client_cls=found.client_cls,
        action_cls=found.action_cls,
        observation_cls=found.observation_cls,
    )


def _named(env_cls: Any) -> Any:
    client_cls = load_object(env_cls, argument="env_cls")
    for method in ("_step_payload", "_parse_result"):
        if not callable(getattr(client_cls, method, None)):
            raise TypeError(
                f"env_cls must be an OpenEnv client class, found {client_cls!r}, which has no "
                f"{method}: an Environment class is for OpenEnv(env_cls=...)"
            )
    return client_cls


os.register_at_fork(after_in_child=_resolved.clear)
