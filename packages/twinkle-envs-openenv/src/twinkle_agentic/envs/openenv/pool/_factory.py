"""What the pool makes its environments from, and what it refuses to hold."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from twinkle_agentic.envs.base import Env

__all__ = ["EnvFactory", "env_maker", "refuse_network_client"]

EnvFactory = Callable[..., Env] | str
"""A class, a callable or `'module:attribute'`; called with the `env_kwargs`."""

_DEFAULT_FACTORY = "twinkle_agentic.envs.openenv.embedded:OpenEnv"
_NETWORK_CLIENTS = {
    "OpenEnvClient": "the session lives on the server, which has its own concurrent sessions",
    "AgentEnv": "the sandbox is scheduled by the AgentENV server",
}


def env_maker(env_factory: EnvFactory | None, env_kwargs: Mapping[str, Any]) -> Callable[[], Env]:
    """Resolve the factory, importing its module, and bind the arguments.

    Args:
        env_factory: `None` is the embedded `OpenEnv`.
        env_kwargs: Keyword arguments of each call.

    Raises:
        ImportError: The module of a `'module:attribute'` cannot be imported.
        AttributeError: It has no such attribute.
        TypeError: Not callable, or a client of a server.
        ValueError: A text that is not `'module:attribute'`.
    """
    factory = _DEFAULT_FACTORY if env_factory is None else env_factory
    found: Any = factory
    if isinstance(factory, str):
        module, colon, attribute = factory.partition(":")
        if not (module and colon and attribute):
            raise ValueError(
                f"env_factory {factory!r} names no class: write it as 'module:ClassName'"
            )
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"env_factory must be a class or a callable, found {found!r}")
    refuse_network_client(found)
    make: Callable[..., object] = found

    def make_env() -> Env:
        env = make(**env_kwargs)
        refuse_network_client(env)
        if not isinstance(env, Env):
            raise TypeError(f"env_factory must give an Env, found {env!r}: subclass Env")
        return env

    return make_env


def refuse_network_client(candidate: object) -> None:
    """Raise for a client of a server, as class, instance or `'module:ClassName'`.

    Raises:
        TypeError: With the reason and what to do instead.
    """
    if isinstance(candidate, str):
        names = [candidate.partition(":")[2]]
    else:
        kind = candidate if isinstance(candidate, type) else type(candidate)
        names = [base.__name__ for base in kind.__mro__]
    for name in names:
        if name in _NETWORK_CLIENTS:
            raise TypeError(
                f"{name} does not belong into an EnvPool: {_NETWORK_CLIENTS[name]}, and "
                "sharding it over workers once more only adds an RPC; let the env_factory of "
                "the rollout make one per trajectory"
            )
