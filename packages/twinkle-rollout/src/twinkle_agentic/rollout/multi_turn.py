"""Multi-turn rollout with a sampler in this process: one batched call per turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import background_call
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout._batch import CANCELLATION_S, Batch, OnDone, collect
from twinkle_agentic.rollout._checks import (
    attempts_of,
    check_attempts,
    check_choice,
    check_exclusive,
    check_failures,
    check_overrides,
    check_trajectories,
    one_sample,
    resolve_managers,
    tools_or_envs,
)
from twinkle_agentic.rollout._episode import Plan
from twinkle_agentic.rollout._episode_env import EnvPlan, EnvThreads
from twinkle_agentic.rollout._sampled import SampledChat, SamplerBatch
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.failures import Coverage, FailurePolicy, RolloutResult
from twinkle_agentic.rollout.sampler import Sampler, Template
from twinkle_agentic.rollout.trace import TraceWriter, trace_record
from twinkle_agentic.rollout.types import (
    BrokenCallAnswer,
    EnvFactory,
    Limits,
    ResetObservation,
    TokenTrajectory,
)

__all__ = ["MultiTurnRollout"]

_OVERRIDES = (
    "sampling_params",
    "tool_manager",
    "env_factory",
    "group_size",
    "global_step",
    "on_done",
)


class MultiTurnRollout(Rollout):
    """Drives a batch of conversations with a sampler in this process.

    Each turn is one `sampler.sample` call over the trajectories still going; the tool calls of the
    turn then run, those of different trajectories at the same time. Sampled ids and their log
    probabilities are kept as they are; tool messages and the next prompt are appended as tokens
    labelled -100.

    Either `env_factory` makes an env for each trajectory (made, reset, scored where it overrides
    `evaluate`, closed on every path, interruption included), or `tool_manager` brings tools, whose
    envs the caller resets, scores and closes. The envs of a batch live at the same time, from
    before its first turn (a pool needs a slot for each); each is scored and closed as its
    trajectory ends, while the others go on.

    The model is shown the `tools` of a trajectory, where it has them, else those of its own env; a
    manager's definitions are not added to the prompt.

    What comes back is described at `TokenTrajectory`; the model input (`input_ids`, `labels`,
    ...) is among it. Tool messages that ended a trajectory are in `messages` only: they have no
    tokens.

    Args:
        sampler: See `twinkle_agentic.rollout.sampler`.
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
        success_callback: Says whether it is a success, for the name of the file (`ok-`, `fail-`);
            by default a positive reward without an error is one, and what has neither is
            `unscored-`.
        env_factory: `trajectory -> env`, plain (run in a thread) or a coroutine function; excludes
            `tool_manager`.
        reset_observation: Where a non-empty observation of `reset` goes: `append` to the last user
            message (a message of its own where the last is none), `message` for a user message of
            its own, `ignore`.
        tool_timeout_s: Limit of one tool call (a tool's own limit goes first); `None` for none.
            After the step of an env the episode is lost.
        reset_timeout_s: Limit of making and resetting the env.
        evaluate_timeout_s: Limit of scoring.
        close_timeout_s: Limit of closing the env.
        max_threads: Threads for blocking tools and steps, and as many for resets and for closing;
            further calls queue.
        max_attempts: How often a trajectory is played at most; as for `APIMultiTurnRollout`.
        deadline_s: Limit of one trajectory, all its attempts together; `None` for none. A turn that
            is being sampled is not cut.
        execute_final_calls: Overrides which calls of the last turn are executed: all or none.
        on_done: Called with each finished trajectory as it ends; as for `APIMultiTurnRollout`.
        retry: How trajectories are played again; `max_attempts` is the short form.
        finish_reason_required: Whether a turn without a finish reason fails, since it may have been
            cut. A reason outside the protocol (`abort`, ...) always does.
        on_broken_call: What follows a message whose tool call cannot be read: `answer` it with an
            error, so that the model may try again, or `end` the trajectory.
        max_broken_calls: How many such messages in a row are answered.
        group_size: How often each input is played; as for `APIMultiTurnRollout`.
        failure_policy: What becomes of failed trajectories; as for `APIMultiTurnRollout`.

    Raises:
        ValueError: A limit is out of range, `num_samples` is not 1, both `tool_manager` and
            `env_factory` are given, the template is missing or splits what is too long.
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
        env_factory: EnvFactory | None = None,
        reset_observation: ResetObservation = "append",
        tool_timeout_s: float | None = 600.0,
        reset_timeout_s: float | None = 600.0,
        evaluate_timeout_s: float | None = 600.0,
        close_timeout_s: float = 30.0,
        max_threads: int = 256,
        max_attempts: int = 1,
        deadline_s: float | None = None,
        execute_final_calls: bool | None = None,
        on_done: OnDone | None = None,
        retry: RetryPolicy | None = None,
        finish_reason_required: bool = True,
        on_broken_call: BrokenCallAnswer = "end",
        max_broken_calls: int = 3,
        group_size: int = 1,
        failure_policy: FailurePolicy | None = None,
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
        check_exclusive(tool_manager, env_factory)
        check_choice("reset_observation", reset_observation, ResetObservation)
        check_choice("on_broken_call", on_broken_call, BrokenCallAnswer)
        check_count("max_threads", max_threads)
        check_count("max_broken_calls", max_broken_calls, at_least=0)
        self.retry = attempts_of(max_attempts, retry, env_factory)
        self.group_size = group_size
        self.failure_policy = failure_policy or FailurePolicy()
        check_failures(self.failure_policy, self.retry.max_attempts, group_size)
        self.execute_final_calls = execute_final_calls
        self.on_done = on_done
        self.finish_reason_required = finish_reason_required
        self.on_broken_call: BrokenCallAnswer = on_broken_call
        self.max_broken_calls = max_broken_calls
        self.sampler = sampler
        self.template = template
        self.tool_manager = tool_manager
        self.env_factory = env_factory
        self.sampling_params = one_sample(sampling_params or SamplingParams())
        self.limits = Limits(
            max_turns=max_turns,
            max_trajectory_tokens=max_trajectory_tokens,
            deadline_s=deadline_s,
            tool_timeout_s=tool_timeout_s,
            reset_timeout_s=reset_timeout_s,
            evaluate_timeout_s=evaluate_timeout_s,
            close_timeout_s=close_timeout_s,
        )
        self.reset_observation: ResetObservation = reset_observation
        self.trace_dir = trace_dir
        self.trace_callback = trace_callback
        self.success_callback = success_callback
        self._env_threads = EnvThreads(max_threads)
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

    @property
    def max_turns(self) -> int:
        """Model messages per trajectory."""
        return self.limits.max_turns

    @property
    def max_trajectory_tokens(self) -> int | None:
        """Where a trajectory ends for its length."""
        return self.limits.max_trajectory_tokens

    def __call__(
        self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[TokenTrajectory]:
        """Roll out every trajectory.

        Args:
            trajectories: Prompts; not changed.
            **kwargs: For this call only: `sampling_params`, `tool_manager`, `env_factory`,
                `group_size`, `global_step` (for the names of traces), `on_done`.

        Returns:
            As for `APIMultiTurnRollout`: in the order of the inputs, with a `coverage`.

        Raises:
            TypeError: `trajectories` is a single one, one of them is no mapping, or an override is
                not known.
            ValueError: A manager list does not fit, or one env would serve several trajectories.
            RuntimeError: The sampler broke its contract: a response missing, sampled ids changed,
                log probabilities or labels that do not fit the ids.
            RolloutFailedError: A trajectory failed for which `failure_policy` says `fail`.
            Exception: Whatever the sampler raised. All envs of `env_factory` are closed by then.
        """
        check_overrides(kwargs, _OVERRIDES)
        given = check_trajectories(trajectories)
        manager, factory = tools_or_envs(self.tool_manager, self.env_factory, kwargs)
        check_attempts(self.retry.max_attempts, factory)
        group_size = kwargs.get("group_size", self.group_size)
        check_failures(self.failure_policy, self.retry.max_attempts, group_size)
        managers = None
        if factory is None:
            managers = resolve_managers(manager, len(given), group_size=group_size)
        if not given:
            return RolloutResult([], Coverage())
        params = one_sample(kwargs.get("sampling_params") or self.sampling_params)
        count = len(given) * group_size
        sampled = SamplerBatch(self.sampler, params, size=count)
        chats: list[SampledChat] = []

        def source(trajectory: Mapping[str, Any]) -> SampledChat:
            chat = SampledChat(
                sampled,
                trajectory,
                self.template,
                max_tokens=self.limits.max_trajectory_tokens,
                shows_tools=factory is not None,
            )
            chats.append(chat)
            return chat

        plan = Plan(
            source=source,
            limits=self.limits,
            envs=None
            if factory is None
            else EnvPlan(
                factory=factory,
                limits=self.limits,
                reset_observation=self.reset_observation,
                threads=self._env_threads,
                wait_for_slot=False,
            ),
            execute_final_calls=self.execute_final_calls,
            on_broken_call=self.on_broken_call,
            max_broken_calls=self.max_broken_calls,
            finish_reason_required=self.finish_reason_required,
            retry=self.retry,
            failures=self.failure_policy,
            step_pool=self._env_threads.step,
        )
        batch = Batch(
            plan,
            group_size=group_size,
            concurrency=count,
            max_ready=count,
            traces=self._traces,
            global_step=kwargs.get("global_step"),
            on_done=kwargs.get("on_done") or self.on_done,
        )
        playing = background_call(
            collect(batch, given, managers),
            sampled.notify,
        )
        try:
            playing.start()
            sampled.serve(playing.ended)
            outs = playing.result()
            for chat in chats:
                chat.check()
        except BaseException:
            playing.interrupt(self.limits.close_timeout_s + CANCELLATION_S)
            raise
        return cast("list[TokenTrajectory]", outs)

    def _build_trace_record(
        self, traj: dict[str, Any], *, idx: int, success: bool | None
    ) -> dict[str, Any]:
        """Make what is written of a trajectory; a subclass may add to it."""
        return trace_record(traj, idx=idx, success=success)
