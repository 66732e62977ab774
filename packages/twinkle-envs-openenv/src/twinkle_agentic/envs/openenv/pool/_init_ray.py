"""Connecting this process to Ray, with no variable to set and no command to run before."""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Generator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

__all__ = ["import_ray", "init_ray"]

_LOCAL = "local"  # Ray's name for a cluster started by this process
_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
_UV_RUN_VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
_OBJECT_STORE_BYTES = 256 * 2**20  # of a Ray that the pool starts; what crosses is text


def import_ray() -> Any:
    """Import Ray.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to get it.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'EnvPool with workers needs Ray, which is not installed: run "pip install '
            "'twinkle-envs-openenv[ray]'\", or pass num_workers=0 to stay in this process",
            name=error.name,
        ) from error


def init_ray(ray: Any, cpus_needed: float, ray_options: Mapping[str, Any]) -> None:
    """Join the cluster that RAY_ADDRESS or this machine offers, else start a small local one.

    Args:
        ray: The module.
        cpus_needed: By all workers of the pool; a local cluster claims that many at least.
        ray_options: Of `ray.init`; where there are any, they alone decide.
    """
    started = time.monotonic()
    if ray_options:
        _init(ray, ray_options)
        return
    try:
        ray.init(address="auto")
    except ConnectionError:
        local = {
            "address": _LOCAL,
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus_needed)),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
        _init(ray, local)
    logger.info("Ray is ready after %.1f s", time.monotonic() - started)


def _init(ray: Any, options: Mapping[str, Any]) -> None:
    here = options.get("address") == _LOCAL
    with _workers_by_this_interpreter() if here else contextlib.nullcontext():
        _init_with_token(ray, options)


def _init_with_token(ray: Any, options: Mapping[str, Any]) -> None:
    """Start Ray, which writes its token to the home directory, also where that is read-only."""
    try:
        ray.init(**options)
    except ConnectionError:
        raise
    except OSError:
        if _TOKEN_VARIABLE in os.environ:
            raise
        os.environ[_TOKEN_VARIABLE] = secrets.token_hex(32)  # the processes of Ray inherit it
        ray.init(**options)


@contextlib.contextmanager
def _workers_by_this_interpreter() -> Generator[None]:
    """Keep Ray from starting the workers by `uv run`, which it does where this process was.

    They would run in a copy of the working directory, which Ray uploads whole, and uv would set up
    an environment there first. That is of use on other machines; on this one the interpreter and
    all it imports are at hand. A variable that the user has set decides instead.
    """
    constants = sys.modules.get("ray._private.ray_constants")
    if _UV_RUN_VARIABLE in os.environ or not getattr(constants, _UV_RUN_VARIABLE, False):
        yield
        return
    setattr(constants, _UV_RUN_VARIABLE, False)
    try:
        yield
    finally:
        setattr(constants, _UV_RUN_VARIABLE, True)
