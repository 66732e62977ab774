"""The batch calls of a pool: many slots, one RPC per worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.openenv.pool.driver import SlotDriver
from twinkle_agentic.envs.openenv.pool.requests import RequestMaker
from twinkle_agentic.envs.openenv.pool.stragglers import Stragglers
from twinkle_agentic.envs.openenv.pool.wire import as_result
from twinkle_agentic.tools.types import Trajectory

__all__ = ["BatchCalls"]


class BatchCalls:
    """The part of `EnvPool` that acts on many slots at once."""

    def __init__(self, driver: SlotDriver, stragglers: Stragglers, requests: RequestMaker) -> None:
        self._driver = driver
        self._stragglers = stragglers
        self._requests = requests

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
        requests = self._requests.reset_batch(indices, trajectories, seeds, reset_kwargs)
        return [as_result(value) for value in self._driver.batch(requests)]

    async def areset_batch(
        self,
        indices: Sequence[int],
        trajectories: Sequence[Trajectory | None] | None = None,
        *,
        seeds: Sequence[int | None] | None = None,
        **reset_kwargs: Any,
    ) -> list[StepResult]:
        """Start new episodes without blocking the event loop; as `reset_batch`."""
        requests = self._requests.reset_batch(indices, trajectories, seeds, reset_kwargs)
        return [as_result(value) for value in await self._driver.abatch(requests)]

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
            requests = self._requests.step_batch(indices, tool_names, arguments_list)
            return [as_result(value) for value in self._driver.batch(requests)]
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
        requests = self._requests.step_batch(indices, tool_names, arguments_list)
        if min_results is None:
            return [as_result(value) for value in await self._driver.abatch(requests)]
        if not 0 <= min_results <= len(requests):
            raise ValueError(
                f"min_results={min_results} is out of range for a batch of {len(requests)}"
            )
        values = await self._stragglers.first(requests, min_results)
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
        late = await self._stragglers.collect(min_results, timeout_s)
        return {slot: as_result(value) for slot, value in late.items()}
