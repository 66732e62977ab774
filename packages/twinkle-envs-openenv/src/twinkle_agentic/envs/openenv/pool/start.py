"""Starting the workers of a pool, so that whatever is wrong shows at construction."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.envs.errors import EnvTimeoutError, PoolError, WorkerLostError
from twinkle_agentic.envs.openenv.pool.factory import EnvFactory, refuse_network_client
from twinkle_agentic.envs.openenv.pool.init_ray import import_ray
from twinkle_agentic.envs.openenv.pool.local_workers import LocalWorkers
from twinkle_agentic.envs.openenv.pool.ray_workers import RayWorkers
from twinkle_agentic.envs.openenv.pool.wire import Failure, unpack_reply
from twinkle_agentic.envs.openenv.pool.workers import Workers

__all__ = ["FirstEnv", "cut_into_shards", "start_workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstEnv:
    """What the first environment of a pool told when it was made.

    Attributes:
        tools: Its tool definitions; `None` where it cannot tell them before a reset.
        scores: Whether its class overrides `evaluate`.
    """

    tools: list[Any] | None
    scores: bool


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
    slot_threads: bool,
    num_cpus: float,
    worker_options: Mapping[str, Any],
    ray_options: Mapping[str, Any],
    timeout_s: float,
) -> tuple[Workers, FirstEnv]:
    """Start the workers and have each make one environment.

    Returns:
        The workers, and what the first environment told of itself.

    Raises:
        PoolError: A worker cannot import or make the environment, or was not ready within
            `timeout_s`.
    """
    refuse_network_client("" if env_factory is None else env_factory)
    workers: Workers
    if local:
        workers = LocalWorkers(shards, (env_factory, env_kwargs), slot_threads=slot_threads)
    else:
        workers = RayWorkers(
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
        if isinstance(workers, RayWorkers) and isinstance(error, EnvTimeoutError):
            room = f"; {workers.describe_room()}: ask for less"
        elif isinstance(workers, RayWorkers) and isinstance(error, WorkerLostError):
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


async def _all_started(workers: Workers, timeout_s: float) -> FirstEnv:
    async def one(worker: int) -> Any:
        return unpack_reply(await workers.acall(worker, "start", timeout_s, timeout_s + 1.0))[1]

    answers = await asyncio.gather(*(one(worker) for worker in range(len(workers.shards))))
    for worker, answer in enumerate(answers):
        if isinstance(answer, Failure):
            raise PoolError(f"worker {worker} of the pool cannot start: {answer.text}")
    return FirstEnv(**answers[0])
