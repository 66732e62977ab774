"""Many embedded environments behind one object, sharded over workers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, overload

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import PoolError
from twinkle_agentic.envs.openenv.pool._adapter import EnvPoolAdapter, ScoringAdapter
from twinkle_agentic.envs.openenv.pool._at_exit import close_at_exit
from twinkle_agentic.envs.openenv.pool._driver import SlotDriver
from twinkle_agentic.envs.openenv.pool._episodes import Episodes
from twinkle_agentic.envs.openenv.pool._factory import EnvFactory
from twinkle_agentic.envs.openenv.pool._late_steps import LateSteps
from twinkle_agentic.envs.openenv.pool._leases import Leases
from twinkle_agentic.envs.openenv.pool._messages import (
    SlotRequest,
    as_result,
    pack_requests,
    value_or_raise,
)
from twinkle_agentic.envs.openenv.pool._start import cut_into_shards, start_workers
from twinkle_agentic.envs.openenv.pool._stats import WorkerStats, collect_stats
from twinkle_agentic.tools.types import ToolInfo, Trajectory

logger = logging.getLogger(__name__)

__all__ = ["EnvPool", "HasWorldSize"]


class HasWorldSize(Protocol):
    """What the pool needs of a device mesh."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        ...


class EnvPool:
    """Holds `pool_size` environments, sharded over workers.

    A shard has `ceil(pool_size / workers)` slots, the last one what is left. Each environment is
    made, stepped and closed in one thread, its own unless it is instant (`slot_threads`), so the
    slots of a worker run side by side. A slot call is one RPC to the owner of the slot, a batch one
    RPC per owner. A slot that fails, hangs or loses its worker fails alone: its results say so
    (`done=True`, `info["error"]`, `info["error_kind"]`) until its next `reset`, which gives it a
    new environment; Ray restarts a worker that died. Thread-safe, one caller per slot at a time;
    not picklable. Close it, or use it in `with`. For a rollout: `env_factory=lambda trajectory:
    pool.lease()`, and `"tools": "auto"` among `env_kwargs`.

    Args:
        pool_size: Number of slots.
        device_mesh: Anything with `world_size`, which is the number of workers.
        env_kwargs: Arguments of each environment, by default those of the embedded `OpenEnv`. Its
            `tools` are none unless asked for, and a model then sees one `env_action` without
            parameters; `"tools": "auto"` makes them from the Action's fields or the MCP tools.
        num_workers: Number of Ray workers where there is no mesh. 0, the default, keeps the
            environments in this process, without Ray.
        env_factory: What makes an environment: an `Env` subclass, a callable or
            `'module:attribute'`; by default the embedded `OpenEnv`. Workers must be able to import
            it.
        slot_threads: Give each slot a thread of its own. False runs all slots of a worker in one
            thread, which saves a thread switch per step where environments answer in microseconds;
            a slow one then holds up its neighbours, and one that hangs takes their episodes along.
            By default, as `Env.instant` of the first environment says.
        num_cpus: CPUs that each worker reserves in Ray. Small by default, for environments that
            mostly wait.
        worker_options: Ray actor options (`resources`, `runtime_env`, `scheduling_strategy`, ...),
            which win over the pool's.
        ray_options: Arguments of `ray.init`, where Ray is not initialised yet. By default the pool
            joins the cluster that `RAY_ADDRESS` or this machine offers, whose nodes must have this
            package, else starts a local one, which the last pool that is closed ends. To leave
            other clusters alone: `{"address": "local"}`.
        step_timeout_s: Seconds a step may take; then the slot is lost.
        reset_timeout_s: Seconds a reset may take, the restart of its worker included.
        lease_timeout_s: Seconds a leased env waits for a free slot.
        start_timeout_s: Seconds the workers may take to start and make their first environment;
            importing `openenv` alone takes each of them nine seconds of CPU.
        close_timeout_s: Seconds the environments may take to close.

    Attributes:
        pool_size: Number of slots.
        num_workers: Number of Ray workers, 0 without Ray.
        lease_timeout_s: As above.

    Raises:
        ValueError: A size or limit is out of range, or mesh and `num_workers` disagree.
        TypeError: `env_factory` is a client of a server, or the arguments do not pickle.
        PoolError: The workers did not start: out of CPUs, a module they cannot import, wrong
            `env_kwargs`.

    Example:
        >>> kwargs = {"env_name": "word_game_env", "tools": "auto"}
        >>> with EnvPool(64, env_kwargs=kwargs, num_workers=2) as pool:
        ...     results = pool.reset_batch(range(64))
        ...     envs = pool.get_adapters(64)
    """

    def __init__(
        self,
        pool_size: int = 32,
        device_mesh: HasWorldSize | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        num_workers: int | None = None,
        env_factory: EnvFactory | None = None,
        slot_threads: bool | None = None,
        num_cpus: float = 0.1,
        worker_options: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        step_timeout_s: float = 120.0,
        reset_timeout_s: float = 120.0,
        lease_timeout_s: float = 1_800.0,
        start_timeout_s: float = 300.0,
        close_timeout_s: float = 10.0,
    ) -> None:
        world_size = _world_size(device_mesh, num_workers)
        shards = cut_into_shards(pool_size, world_size)
        limits = {
            "step_timeout_s": step_timeout_s,
            "reset_timeout_s": reset_timeout_s,
            "lease_timeout_s": lease_timeout_s,
            "start_timeout_s": start_timeout_s,
            "close_timeout_s": close_timeout_s,
        }
        for name, limit in limits.items():
            check_limit(name, limit)
        self.pool_size = pool_size
        self.num_workers = world_size and len(shards)
        self.lease_timeout_s = lease_timeout_s
        self._close_timeout_s = close_timeout_s
        backend, first_env = start_workers(
            shards,
            local=not world_size,
            env_factory=env_factory,
            env_kwargs=env_kwargs or {},
            slot_threads=slot_threads,
            num_cpus=num_cpus,
            worker_options=worker_options or {},
            ray_options=ray_options or {},
            timeout_s=start_timeout_s,
        )
        self._episodes = Episodes(
            pool_size, step_timeout_s=step_timeout_s, reset_timeout_s=reset_timeout_s
        )
        self._driver = SlotDriver(backend, first_env, self._episodes)
        self._late = LateSteps(self._driver)
        # Neighbours in the queue belong to different workers, so that few episodes use all of them.
        order = sorted(range(pool_size), key=lambda slot: slot % len(shards[0]))
        self._leases = Leases(order)
        self._close_lock = threading.Lock()
        close_at_exit(self)

    def reset(
        self,
        idx: int,
        trajectory: Trajectory | None = None,
        *,
        seed: int | None = None,
        **reset_kwargs: Any,
    ) -> StepResult:
        """Start a new episode in a slot; revives a lost one.

        Args:
            idx: The slot, `0 <= idx < pool_size`.
            trajectory: Passed to the environment.
            seed: Put into the trajectory's `user_data`, where the environment looks for it.
            **reset_kwargs: Likewise, and into its `reset_kwargs`: an OpenEnv environment that
                cannot take one of them fails the reset.

        Raises:
            IndexError: No such slot.
            EnvError: The environment could not be made or reset.
            EnvTimeoutError: It did not answer within `reset_timeout_s`.
            WorkerLostError: Its worker died and was not back within `reset_timeout_s`.
            PoolError: The pool is closed.
        """
        requests = self._reset_requests([idx], [trajectory], [seed], reset_kwargs)
        return value_or_raise(self._driver.run(requests)[0])

    async def areset(
        self,
        idx: int,
        trajectory: Trajectory | None = None,
        *,
        seed: int | None = None,
        **reset_kwargs: Any,
    ) -> StepResult:
        """Start a new episode without blocking the event loop; as `reset`."""
        requests = self._reset_requests([idx], [trajectory], [seed], reset_kwargs)
        return value_or_raise((await self._driver.arun(requests))[0])

    def step(
        self, idx: int, tool_name: str, arguments: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Run one action in a slot.

        Returns:
            What the environment gave, with `info["episode_reward"]`. Where the episode is gone:
            `done=True`, `info["error"]`, `info["error_kind"]` (`env` for a failed environment or a
            dead worker, `timeout`) and `info["retryable"]`.

        Raises:
            IndexError: No such slot.
            TypeError: The arguments cannot be pickled.
            PoolError: The pool is closed, or a step of the slot was left running and is not
                collected.
        """
        requests = self._step_requests([idx], [tool_name], [arguments])
        return as_result(self._driver.run(requests)[0])

    async def astep(
        self, idx: int, tool_name: str, arguments: Mapping[str, Any] | None = None
    ) -> StepResult:
        """Run one action without blocking the event loop; as `step`."""
        requests = self._step_requests([idx], [tool_name], [arguments])
        return as_result((await self._driver.arun(requests))[0])

    def reset_batch(
        self,
        indices: Sequence[int],
        trajectories: Sequence[Trajectory | None] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        **reset_kwargs: Any,
    ) -> list[StepResult]:
        """Start new episodes in many slots, one RPC per worker.

        Args:
            indices: Slots, each once.
            trajectories: One per slot.
            seeds: One per slot.
            **reset_kwargs: For all of them.

        Returns:
            Results in the order of `indices`; a slot that failed says so in `info["error"]`.

        Raises:
            IndexError: No such slot.
            ValueError: A slot occurs twice, or the lists differ in length.
            PoolError: The pool is closed.
        """
        requests = self._reset_requests(indices, trajectories, seeds, reset_kwargs)
        return [as_result(value) for value in self._driver.run(requests)]

    async def areset_batch(
        self,
        indices: Sequence[int],
        trajectories: Sequence[Trajectory | None] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        **reset_kwargs: Any,
    ) -> list[StepResult]:
        """Start new episodes without blocking the event loop; as `reset_batch`."""
        requests = self._reset_requests(indices, trajectories, seeds, reset_kwargs)
        return [as_result(value) for value in await self._driver.arun(requests)]

    @overload
    def step_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
        *,
        min_results: None = None,
    ) -> list[StepResult]: ...
    @overload
    def step_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
        *,
        min_results: int,
    ) -> list[StepResult | None]: ...
    def step_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
        *,
        min_results: int | None = None,
    ) -> list[StepResult] | list[StepResult | None]:
        """Run one action in each of many slots, side by side, one RPC per worker.

        Args:
            indices: Slots, each once.
            tool_names: One per slot.
            arguments_list: One per slot.
            min_results: Return as soon as this many are done; the others run on, and `collect`
                gives their results. A worker then answers as its slots finish, in more than one
                RPC.

        Returns:
            Results in the order of `indices`; with `min_results`, `None` for a slot that still
            runs.

        Raises:
            IndexError: No such slot.
            ValueError: A slot occurs twice, the lists differ in length, or `min_results` is out of
                range.
            TypeError: Arguments cannot be pickled; nothing was stepped.
            PoolError: The pool is closed, or a step left running earlier is not collected.
        """
        if min_results is None:
            requests = self._step_requests(indices, tool_names, arguments_list)
            return [as_result(value) for value in self._driver.run(requests)]
        return run_sync(
            self.astep_batch(indices, tool_names, arguments_list, min_results=min_results)
        )

    @overload
    async def astep_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
        *,
        min_results: None = None,
    ) -> list[StepResult]: ...
    @overload
    async def astep_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
        *,
        min_results: int,
    ) -> list[StepResult | None]: ...
    async def astep_batch(
        self,
        indices: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
        *,
        min_results: int | None = None,
    ) -> list[StepResult] | list[StepResult | None]:
        """Run one action in each of many slots without blocking the event loop; as `step_batch`."""
        requests = self._step_requests(indices, tool_names, arguments_list)
        if min_results is None:
            return [as_result(value) for value in await self._driver.arun(requests)]
        if not 0 <= min_results <= len(requests):
            raise ValueError(
                f"min_results={min_results} is out of range for a batch of {len(requests)}"
            )
        pack_requests(requests)  # bad arguments must not leave half a batch running
        values = await self._late.first(requests, min_results)
        return [None if value is None else as_result(value) for value in values]

    def collect(
        self, min_results: int | None = None, *, timeout_s: float | None = None
    ) -> dict[int, StepResult]:
        """Take the results of steps that a `step_batch(..., min_results=...)` left running.

        Args:
            min_results: Return as soon as this many are there; by default wait for all. 0 does not
                wait.
            timeout_s: Seconds to wait at most; each step is bounded by `step_timeout_s` anyway.

        Returns:
            Slot -> result, in the order of arrival; fewer than asked for where no more run or the
            time is up.

        Raises:
            ValueError: `timeout_s` is no limit, or `min_results` no number of results.
        """
        return run_sync(self.acollect(min_results, timeout_s=timeout_s))

    async def acollect(
        self, min_results: int | None = None, *, timeout_s: float | None = None
    ) -> dict[int, StepResult]:
        """Take late results without blocking the event loop; as `collect`."""
        check_limit("timeout_s", timeout_s, allow_zero=True, allow_none=True)
        check_count("min_results", min_results, at_least=0, allow_none=True)
        late = await self._late.collect(min_results, timeout_s)
        return {slot: as_result(value) for slot, value in late.items()}

    def get_adapters(self, n: int) -> list[EnvPoolAdapter]:
        """Wrap the first `n` slots as plain envs; `lease` leaves them alone from now on.

        Raises:
            ValueError: `n` is larger than the pool.
            PoolError: One of them is leased, or the pool is closed.
        """
        if not 0 <= n <= self.pool_size:
            raise ValueError(
                f"{n} adapters were asked for, but the pool has {self.pool_size} slots"
            )
        self._leases.pin(range(n))
        return [self._adapter(slot) for slot in range(n)]

    def lease(self, *, timeout_s: float | None = None) -> EnvPoolAdapter:
        """Lend a slot as a plain env until its `close` or `aclose`; never blocks.

        Where no slot is free, the first `reset` (or `areset`) of the env waits for one, first come,
        first served. So `env_factory=lambda trajectory: pool.lease()` lets an `APIMultiTurnRollout`
        run more episodes than slots, and their wait counts against none of its limits.

        Args:
            timeout_s: Seconds that `reset` waits for a slot; by default `lease_timeout_s`.

        Raises:
            PoolError: The pool is closed, or all slots were given out by `get_adapters`.
            ValueError: `timeout_s` is no limit.
        """
        check_limit("timeout_s", timeout_s, allow_zero=True, allow_none=True)
        return self._adapter(None, timeout_s=timeout_s)

    async def alease(self, *, timeout_s: float | None = None) -> EnvPoolAdapter:
        """Lend a slot as `lease` does, waiting for a free one before it returns.

        For callers of their own: as an `env_factory` its wait counts as the making of the env.

        Raises:
            PoolError: No slot became free in time (`kind` is `capacity`), or the pool is closed.
        """
        adapter = self.lease(timeout_s=timeout_s)
        await adapter.aacquire()
        return adapter

    @property
    def num_free(self) -> int:
        """Slots that are neither leased nor given out by `get_adapters`."""
        return self._leases.num_free

    @property
    def num_waiting(self) -> int:
        """Leased envs that wait for a slot."""
        return self._leases.num_waiting

    def tools(self, idx: int | None = None) -> list[ToolInfo]:
        """Return the tool definitions of a slot; without `idx` those of the first environment made.

        Raises:
            TwinkleEnvError: The environment raised, did not answer in time, or is lost.
        """
        return self._driver.tools(idx)

    def evaluate(self, idx: int, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories with the environment of a slot; raises as `tools`."""
        request = self._episodes.evaluate_request(idx, trajectories, kwargs)
        return list(value_or_raise(self._driver.call(request)))

    async def aevaluate(
        self, idx: int, trajectories: Sequence[Trajectory], **kwargs: Any
    ) -> list[float]:
        """Score finished trajectories without blocking the event loop; as `evaluate`."""
        request = self._episodes.evaluate_request(idx, trajectories, kwargs)
        return list(value_or_raise(await self._driver.acall(request)))

    def stats(self) -> list[WorkerStats]:
        """Return the figures of all workers; one that gives none within 5 s shows as not alive.

        Raises:
            PoolError: The pool is closed.
        """
        return run_sync(self.astats())

    async def astats(self) -> list[WorkerStats]:
        """Return the figures of all workers without blocking the event loop; as `stats`."""
        self._episodes.check_open()
        return await collect_stats(self._driver)

    def close(self) -> None:
        """Close all environments, within `close_timeout_s`, and end the workers; idempotent."""
        if self._first_to_close():
            run_sync(self._close_envs())
            self._driver.backend.shut_down()

    async def aclose(self) -> None:
        """Close everything without blocking the event loop; as `close`."""
        if self._first_to_close():
            await self._close_envs()
            await run_blocking(self._driver.backend.shut_down)

    def _adapter(self, slot: int | None, *, timeout_s: float | None = None) -> EnvPoolAdapter:
        kind = ScoringAdapter if self._driver.first_env.scores else EnvPoolAdapter
        limit_s = self.lease_timeout_s if timeout_s is None else timeout_s
        return kind(self._driver, self._leases, slot, lease_timeout_s=limit_s)

    def _reset_requests(
        self,
        slots: Sequence[int],
        trajectories: Sequence[Trajectory | None] | None,
        seeds: Sequence[int | None] | None,
        reset_kwargs: Mapping[str, Any],
    ) -> list[SlotRequest]:
        checked = self._episodes.checked(slots, trajectories=trajectories, seeds=seeds)
        trajectories = trajectories or [None] * len(checked)
        seeds = seeds or [None] * len(checked)
        for slot in checked:
            self._late.forget(slot)
        return [
            self._episodes.reset_request(slot, trajectory, seed, reset_kwargs)
            for slot, trajectory, seed in zip(checked, trajectories, seeds, strict=True)
        ]

    def _step_requests(
        self,
        slots: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any] | None],
    ) -> list[SlotRequest]:
        requests = self._episodes.step_requests(slots, tool_names, arguments_list)
        for request in requests:
            if request.slot in self._late:
                raise PoolError(
                    f"slot {request.slot} has a step from an earlier batch whose result was not "
                    "collected: call collect(), or reset the slot"
                )
        return requests

    def _first_to_close(self) -> bool:
        with self._close_lock:
            first, self._episodes.closed = not self._episodes.closed, True
        if first:
            self._leases.close()
        return first

    async def _close_envs(self) -> None:
        limit_s = self._close_timeout_s
        backend = self._driver.backend
        left = await asyncio.gather(
            *(
                backend.acall(worker, "close", limit_s, limit_s + 1.0)
                for worker in range(len(backend.shards))
            ),
            return_exceptions=True,  # a dead or stuck worker has nothing to close any more
        )
        if (unclosed := sum(count for count in left if isinstance(count, int))) > 0:
            logger.warning("%d environments did not close within %g s", unclosed, limit_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def _world_size(device_mesh: HasWorldSize | None, num_workers: int | None) -> int:
    """Return the number of workers asked for, 0 for none."""
    if device_mesh is None:
        check_count("num_workers", num_workers, at_least=0, allow_none=True)
        return num_workers or 0
    size = device_mesh.world_size
    if num_workers is not None and num_workers != size:
        raise ValueError(
            f"num_workers={num_workers} disagrees with the device_mesh, whose world_size is "
            f"{size}: give one of them"
        )
    check_count("the world_size of device_mesh", size)
    return size
