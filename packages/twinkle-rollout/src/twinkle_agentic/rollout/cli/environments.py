"""From `--env` to an environment for each trajectory."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from twinkle_agentic.envs.base import Env
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.tools.types import Trajectory

__all__ = ["EnvChoice", "choose_env"]

EnvFactory = Callable[[Trajectory], Env]

_SHOWN_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvChoice:
    """What `--env` came to.

    Attributes:
        make: Makes the env of one trajectory.
        needs: Columns that each task must have.
        ignores: Columns that would have no effect, so that a task must not have them.
        runs_code: Whether the server must take `code` as its action.
        urls: The servers of which one must serve at the start; empty where there are none.
        source: The file of the user's own env; `None` where there is none.
    """

    make: EnvFactory
    needs: Sequence[str] = ()
    ignores: Sequence[str] = ()
    runs_code: bool = False
    urls: Sequence[str] = ()
    source: Path | None = None


def choose_env(
    spec: str, *, base_urls: Sequence[str] = (), message_timeout_s: float = 120.0
) -> EnvChoice:
    """Read an `--env` value.

    Args:
        spec: `coding_env` (coding tasks scored by unit tests), another OpenEnv package name (its
            server gives the rewards), or `module:name` of a callable that takes the trajectory and
            returns an `Env`, or of an `Env` class without arguments. The working folder is
            importable.
        base_urls: The OpenEnv servers; one is needed for all but `module:name`.
        message_timeout_s: Seconds one step may take on the server.

    Raises:
        RefusedError: The name means nothing here; the message says why.
    """
    if ":" in spec:
        make = _load_factory(spec)
        file = getattr(sys.modules[spec.partition(":")[0]], "__file__", None)
        return EnvChoice(make=make, source=Path(file) if file and os.path.isfile(file) else None)
    if not base_urls:
        raise RefusedError(
            f"--env {spec} needs --base-url, the address of its OpenEnv server; an env of your own "
            "is named module:name"
        )
    try:
        from twinkle_agentic.envs.openenv import CodingTaskEnv, OpenEnvClient
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"--env {spec} needs twinkle-envs-openenv, which cannot be imported ({error}): "
            "run `pip install twinkle-envs-openenv`"
        ) from error
    try:
        OpenEnvClient(env_name=spec, base_url=base_urls).close()
    except (ValueError, TypeError, ImportError) as error:
        raise RefusedError(f"--env {spec} --base-url {' '.join(base_urls)}: {error}") from error
    if spec == "coding_env":
        return EnvChoice(
            make=lambda _: CodingTaskEnv(base_urls, message_timeout_s=message_timeout_s),
            needs=("tests",),
            runs_code=True,
            urls=base_urls,
        )
    return EnvChoice(
        make=lambda _: OpenEnvClient(
            env_name=spec, base_url=base_urls, message_timeout_s=message_timeout_s
        ),
        ignores=("tests",),
        urls=base_urls,
    )


def _load_factory(spec: str) -> EnvFactory:
    module_name, _, name = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does at import
        raise RefusedError(
            f"--env {spec}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name]
        close = get_close_matches(name, own, n=_SHOWN_NAMES) or own[:_SHOWN_NAMES]
        raise RefusedError(
            f"--env {spec}: {module_name} has no callable {name!r} "
            f"(it has {len(own)}: {', '.join(close)})"
        )
    if inspect.isclass(target):
        if not issubclass(target, Env):
            raise RefusedError(f"--env {spec}: class {name} is no Env")
        return lambda _: target()
    return cast("EnvFactory", target)
