"""A batch of trajectories with one sampler: turn by turn until all have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.rollout.sampled_run import SampledRun
from twinkle_agentic.rollout.structural import SampledSequence, Sampler, SampleResponse
from twinkle_agentic.rollout.types import Limits

__all__ = ["SampledBatch"]

_CANCELLATION_S = 10.0  # for what is under way when Ctrl-C comes, before the envs are closed


class SampledBatch:
    """Takes runs to their ends; used once.

    Templates and samplers are called in the caller's thread, as they may be bound to it; tools and
    envs run on the background loop. An env is scored and closed as its trajectory ends, while the
    others go on.

    Args:
        sampler: One call a turn, for all runs that go on.
        runs: Fresh, with envs of their own or all without.
        limits: How far each may go.
        step_pool: Threads for tools, steps and scoring.
    """

    def __init__(
        self,
        sampler: Sampler,
        runs: Sequence[SampledRun],
        *,
        limits: Limits,
        step_pool: ThreadPool,
    ) -> None:
        self._sampler = sampler
        self._runs = runs
        self._limits = limits
        self._step_pool = step_pool
        self._ending: list[asyncio.Task[None]] = []  # what scores and closes the envs
        self._has_envs = any(run.has_own_env for run in runs)
        self._clean_up_s = limits.close_timeout_s + _CANCELLATION_S

    def roll(self, sampling_params: Any) -> dict[str, float]:
        """Take all runs to their ends; all envs of their own are closed then, on every path.

        Returns:
            Seconds of the whole batch: `model`, `tools`, `total`.

        Raises:
            RuntimeError: The sampler broke its contract.
            KeyboardInterrupt: Ctrl-C.
            Exception: Whatever the sampler raised.
        """
        try:
            return self._roll(sampling_params)
        except BaseException:
            if self._has_envs:
                run_sync(self._close_all(), clean_up_s=self._clean_up_s)
            raise

    def _roll(self, sampling_params: Any) -> dict[str, float]:
        limits, timing = self._limits, {"model": 0.0, "tools": 0.0}
        started = time.monotonic()
        if self._has_envs:
            run_sync(self._open(), clean_up_s=self._clean_up_s)
        for run in self._runs:
            run.begin()
        self._let_go(self._runs)
        while live := [run for run in self._runs if run.stop is None]:
            before = time.monotonic()
            sequences = self._sample([run.feature for run in live], sampling_params)
            between = time.monotonic()
            calling = [
                run
                for run, sequence in zip(live, sequences, strict=True)
                if run.take(sequence, limits.max_turns, limits.max_trajectory_tokens)
            ]
            if calling:
                run_sync(self._run_tools(calling))
            for run in calling:
                run.go_on(limits.max_turns, limits.max_trajectory_tokens)
            self._let_go(live)
            timing["model"] += between - before
            timing["tools"] += time.monotonic() - between
        if self._has_envs:
            run_sync(self._join(), clean_up_s=self._clean_up_s)
        timing["total"] = time.monotonic() - started
        return timing

    def _let_go(self, runs: Sequence[SampledRun]) -> None:
        """Start to score and close the envs of those that have just ended."""
        ended = [run for run in runs if run.stop is not None and run.has_own_env]
        if ended:
            run_sync(self._start_ending(ended))

    def _sample(self, features: list[dict[str, Any]], params: Any) -> list[SampledSequence]:
        mesh = getattr(self._sampler, "device_mesh", None)
        least: int = getattr(mesh, "data_world_size", 1) or 1
        batch = features + [features[-1]] * (least - len(features))  # every rank needs an input
        responses: Sequence[SampleResponse] = self._sampler.sample(batch, sampling_params=params)
        if not isinstance(cast("object", responses), (list, tuple)) or len(responses) != len(batch):
            raise RuntimeError(
                f"the sampler must return a list with one response per input: {len(batch)} inputs, "
                f"found {responses!r:.200}"
            )
        sequences: list[SampledSequence] = []
        for number, response in enumerate(responses[: len(features)]):
            if not response.sequences:
                raise RuntimeError(f"response {number} of the sampler has no sequence")
            sequences.append(response.sequences[0])
        return sequences

    async def _open(self) -> None:
        await asyncio.gather(*(run.open() for run in self._runs))

    async def _run_tools(self, runs: Sequence[SampledRun]) -> None:
        use_pool(self._step_pool)
        await asyncio.gather(*(run.execute(self._limits.tool_timeout_s) for run in runs))

    async def _start_ending(self, runs: Sequence[SampledRun]) -> None:
        use_pool(self._step_pool)
        self._ending += [asyncio.create_task(run.finish()) for run in runs]

    async def _join(self) -> None:
        await asyncio.gather(*self._ending)

    async def _close_all(self) -> None:
        """Close every env that is open, scoring no further."""
        for task in self._ending:
            task.cancel()
        closing = (run.close() for run in self._runs)
        await asyncio.gather(*self._ending, *closing, return_exceptions=True)
