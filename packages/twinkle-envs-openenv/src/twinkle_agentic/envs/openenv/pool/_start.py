"""Starting the workers of a pool, so that whatever is wrong shows at construction."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.envs.errors import EnvTimeoutError, PoolError, WorkerLostError
from twinkle_agentic.envs.openenv.pool._driver import FirstEnv
from twinkle_agentic.envs.openenv.pool._factory import EnvFactory, refuse_network_client
from twinkle_agentic.envs.openenv.pool._init_ray import import_ray
from twinkle_agentic.envs.openenv.pool._local_backend import LocalBackend
from twinkle_agentic.envs.openenv.pool._messages import (
    Failure,
    SlotRequest,
    pack_requests,
    unpack_replies,
)
from twinkle_agentic.envs.openenv.pool._ray_backend import RayBackend

__all__ = ["cut_into_shards", "start_workers"]


def cut_into_shards(pool_size: int, world_size: int) -> list[range]:
    """Cut the slots into shards; workers that would hold nothing are left out.

    Args:
        pool_size: Number of slots.
        world_size: Number of workers; 0 makes one shard, for this process.

    Raises:
        ValueError: `pool_size` is no whole number of at least 1.
    """
    check_count("pool_size", pool_size)
    size = math.ceil(pool_size / max(1, world_size))
    return [range(start, min(start + size, pool_size)) for start in range(0, pool_size, size)]


def start_workers(
    shards: list[range],
    *,
    local: bool,
    env_factory: EnvFactory | None,
    env_kwargs: Mapping[str, Any],
    slot_threads: bool | None,
    num_cpus: float,
    worker_options: Mapping[str, Any],
    ray_options: Mapping[str, Any],
    timeout_s: float,
) -> tuple[LocalBackend | RayBackend, FirstEnv]:
    """Start the workers and have each make one environment.

    Returns:
        The workers, and what the first environment says of itself.

    Raises:
        PoolError: A worker cannot import or make the environment, or was not ready within
            `timeout_s`.
    """
    refuse_network_client("" if env_factory is None else env_factory)
    workers: LocalBackend | RayBackend
    if local:
        workers = LocalBackend(shards, (env_factory, env_kwargs), slot_threads=slot_threads)
    else:
        workers = RayBackend(
            shards,
            _pack_spec(env_factory, env_kwargs),
            slot_threads=slot_threads,
            num_cpus=num_cpus,
            worker_options=worker_options,
            ray_options=ray_options,
        )
    try:
        first = run_sync(_all_started(workers, timeout_s))
    except BaseException as error:
        room = other = ""
        if isinstance(workers, RayBackend) and isinstance(error, EnvTimeoutError):
            room = f"; {workers.describe_room()}: ask for less"
        elif isinstance(workers, RayBackend) and isinstance(error, WorkerLostError):
            other = workers.describe_installation()
        workers.shut_down()
        if other:
            raise PoolError(f"the workers of the pool cannot start: {other}") from error
        if isinstance(error, EnvTimeoutError):
            raise PoolError(
                f"the {len(shards)} workers of the pool were not ready within {timeout_s:g} s"
                f"{room}, or raise start_timeout_s"
            ) from error
        raise
    return workers, first


def _pack_spec(env_factory: EnvFactory | None, env_kwargs: Mapping[str, Any]) -> bytes:
    """Pickle what a worker makes its environments from; what `__main__` defines goes by value.

    Raises:
        TypeError: Something in it cannot be pickled.
    """
    cloudpickle: Any = import_ray().cloudpickle
    try:
        return cloudpickle.dumps((env_factory, dict(env_kwargs)))
    except Exception as error:
        raise TypeError(
            f"env_factory and env_kwargs cannot be sent to the workers: {error}; pass what "
            "pickles, and let a factory function make the rest on the worker"
        ) from error


async def _all_started(workers: LocalBackend | RayBackend, timeout_s: float) -> FirstEnv:
    async def one(worker: int) -> Any:
        slot = workers.shards[worker].start
        make = pack_requests([SlotRequest("make", slot, timeout_s=timeout_s)])
        return unpack_replies(await workers.acall(worker, "run", make, timeout_s + 1.0))[1][0]

    answers = await asyncio.gather(*(one(worker) for worker in range(len(workers.shards))))
    for worker, answer in enumerate(answers):
        if isinstance(answer, Failure):
            raise PoolError(f"worker {worker} of the pool cannot start: {answer.text}")
    return FirstEnv(**answers[0])
