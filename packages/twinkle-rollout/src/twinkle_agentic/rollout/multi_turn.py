"""Multi-turn rollout with a sampler in this process: one batched call per turn."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.envs.background import run_sync
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.checks import check_trajectories, one_sample, resolve_managers
from twinkle_agentic.rollout.finished import SampledTrajectory
from twinkle_agentic.rollout.sampled_run import SampledRun
from twinkle_agentic.rollout.structural import SampledSequence, Sampler, SampleResponse, Template
from twinkle_agentic.rollout.trace import TraceWriter, trace_record
from twinkle_agentic.tools.limits import check_count, check_limit
from twinkle_agentic.tools.threads import ThreadPool, use_pool

__all__ = ["MultiTurnRollout"]

_OVERRIDES = ("sampling_params", "tool_manager", "global_step")


class MultiTurnRollout(Rollout):
    """Drives a batch of conversations with a sampler in this process.

    Each turn is one `sampler.sample` call over the trajectories still going; the tool calls of the
    turn then run, those of different trajectories at the same time. Sampled ids and their log
    probabilities are kept as they are; tool messages and the next prompt are appended as tokens
    labelled -100. The envs behind the tools are the caller's to reset and close.

    The model is shown the `tools` of a trajectory, where it has them; a manager's definitions are
    not added to the prompt.

    What comes back is described at `SampledTrajectory`; the model input (`input_ids`, `labels`,
    ...) is among it. Tool messages that ended a trajectory are in `messages` only: they have no
    tokens.

    Args:
        sampler: See `twinkle_agentic.rollout.structural`.
        template: As well; local, not a remote handle.
        tool_manager: One for all trajectories, or a list, one per trajectory. A manager whose tools
            act on one env serves one trajectory only.
        sampling_params: Of each turn; `num_samples` must be 1.
        max_turns: Model messages per trajectory (>= 1). Calls of the last one are executed where an
            env stands behind the tools, and else answered as not executed.
        max_trajectory_tokens: Ends a trajectory (`length`) that has this many tokens, or would with
            the tool messages.
        trace_dir: Folder for one JSON file per trajectory.
        trace_callback: Says of a finished trajectory whether to write its trace.
        success_callback: Says whether it is a success, for the name of the file.
        tool_timeout_s: Limit of one tool call (a tool's own limit goes first); `None` for none.
        max_threads: Threads for blocking tools.

    Raises:
        ValueError: A limit is out of range, `num_samples` is not 1, the template is missing or
            splits what is too long.
    """

    def __init__(
        self,
        sampler: Sampler,
        template: Template,
        tool_manager: Any = None,
        sampling_params: Any = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        trace_callback: Callable[[dict[str, Any]], bool] | None = None,
        success_callback: Callable[[dict[str, Any]], bool] | None = None,
        *,
        tool_timeout_s: float | None = 600.0,
        max_threads: int = 256,
    ) -> None:
        if not hasattr(template, "tokenizer"):
            raise ValueError(
                f"template must be a local template with a tokenizer, found {template!r}"
            )
        if getattr(template, "truncation_strategy", None) == "split":
            raise ValueError(
                "the template has truncation_strategy='split', which would cut a trajectory into "
                "several: use 'left', 'right', 'delete' or 'raise'"
            )
        check_count("max_turns", max_turns)
        check_count("max_trajectory_tokens", max_trajectory_tokens, allow_none=True)
        check_limit("tool_timeout_s", tool_timeout_s, allow_none=True)
        self.sampler = sampler
        self.template = template
        self.tool_manager = tool_manager
        self.sampling_params = one_sample(sampling_params or SamplingParams())
        self.max_turns = max_turns
        self.max_trajectory_tokens = max_trajectory_tokens
        self.tool_timeout_s = tool_timeout_s
        self.trace_dir = trace_dir
        self.trace_callback = trace_callback
        self.success_callback = success_callback
        self._threads = ThreadPool(max_threads)
        self._traces = (
            TraceWriter(
                trace_dir,
                trace_callback=trace_callback,
                success_callback=success_callback,
                build_record=self._build_trace_record,
            )
            if trace_dir
            else None
        )

    def __call__(
        self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[SampledTrajectory]:
        """Roll out every trajectory.

        Args:
            trajectories: Prompts; not changed.
            **kwargs: For this call only: `sampling_params`, `tool_manager`, `global_step` (for the
            names of traces).

        Returns:
            One trajectory per input, in the same order.

        Raises:
            TypeError: `trajectories` is a single one, one of them is no mapping, or an override is
                not known.
            ValueError: A manager list does not fit, or one env would serve several trajectories.
            RuntimeError: The sampler broke its contract: a response missing, sampled ids changed,
                log probabilities or labels that do not fit the ids.
            Exception: Whatever the sampler or `template.encode` raised.
        """
        unknown = sorted(set(kwargs) - set(_OVERRIDES))
        if unknown:
            raise TypeError(f"unknown overrides {unknown}: a call takes {', '.join(_OVERRIDES)}")
        given = check_trajectories(trajectories)
        override: Any = kwargs.get("tool_manager")
        manager = self.tool_manager if override is None else override
        managers = resolve_managers(manager, len(given))
        params = one_sample(kwargs.get("sampling_params") or self.sampling_params)
        started = time.monotonic()
        runs = [
            SampledRun(number, trajectory, self.template, manager)
            for number, (trajectory, manager) in enumerate(zip(given, managers, strict=True))
        ]
        timing = {"model": 0.0, "tools": 0.0}
        while live := [run for run in runs if run.stop is None]:
            before = time.monotonic()
            sequences = self._sample([run.feature for run in live], params)
            between = time.monotonic()
            calling = [
                run
                for run, sequence in zip(live, sequences, strict=True)
                if run.take(sequence, self.max_turns, self.max_trajectory_tokens)
            ]
            if calling:
                run_sync(self._run_tools(calling))
            for run in calling:
                run.go_on(self.max_turns, self.max_trajectory_tokens)
            timing["model"] += between - before
            timing["tools"] += time.monotonic() - between
        timing["total"] = time.monotonic() - started
        outs = [run.output(timing) for run in runs]
        if self._traces is not None:
            for number, out in enumerate(outs):
                path, problem = self._traces.write(
                    out, position=number, global_step=kwargs.get("global_step")
                )
                out["trace_path"] = path
                if problem is not None:
                    out["trace_error"] = problem
        return cast("list[SampledTrajectory]", outs)

    def _sample(self, features: list[dict[str, Any]], params: Any) -> list[SampledSequence]:
        mesh = getattr(self.sampler, "device_mesh", None)
        least: int = getattr(mesh, "data_world_size", 1) or 1
        batch = features + [features[-1]] * (least - len(features))  # every rank needs an input
        responses: Sequence[SampleResponse] = self.sampler.sample(batch, sampling_params=params)
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

    def _build_trace_record(
        self, traj: dict[str, Any], *, idx: int, success: bool
    ) -> dict[str, Any]:
        """Make what is written of a trajectory; a subclass may add to it."""
        return trace_record(traj, idx=idx, success=success)

    async def _run_tools(self, runs: Sequence[SampledRun]) -> None:
        use_pool(self._threads)
        await asyncio.gather(*(run.execute(self.tool_timeout_s) for run in runs))
