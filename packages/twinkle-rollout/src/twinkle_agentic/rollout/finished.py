"""The record of a finished trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from twinkle_agentic.rollout.types import Failure, StopReason
from twinkle_agentic.tools.types import Trajectory

if TYPE_CHECKING:
    from twinkle_agentic.rollout.tool_turn import Toolbox

__all__ = ["FinishedTrajectory", "SampledTrajectory", "TokenTurn", "outcome_fields", "reward_of"]


class TokenTurn(TypedDict):
    """The tokens of one turn, as the server reported them.

    Attributes:
        turn: From 1.
        prompt_token_ids: The whole prompt as the server tokenized it, earlier turns included;
            `None` where it sent none.
        token_ids: What was sampled in this turn; `None` where the server sent none.
        logprobs: Of the sampled tokens, one (<= 0) per id of `token_ids`; `None` where the server
            sent none.
        problem: Why a trainer must not use the turn (missing, lengths differ, no numbers); else
            `None`.
    """

    turn: int
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    logprobs: list[float] | None
    problem: str | None


class FinishedTrajectory(Trajectory):
    """What a rollout returns for one input: a plain dict, the input with these keys added.

    `messages` is the whole conversation. What the rollout adds to it can be continued: unique call
    ids, arguments that are JSON objects, every call answered. The messages it was given stay as
    they are; what is sent of them is repaired. `tools` is what the model was offered.

    Attributes:
        turns: Model messages.
        stop_reason: A `StopReason` value.
        truncated: It did not end by itself (`stop`, `env_done`).
        reward: The step rewards of the env together with `eval_reward`; `None` after `api_error` or
            `env_error`, where no turn was completed, where there is no env, and where the env
            scores trajectories itself but was cut by the deadline in the middle of a step.
        step_rewards: One per step of the env. The reward of `reset` is not counted.
        eval_reward: What `evaluate` gave; `None` where the env does not override it, or did not get
            to it.
        reward_missing_steps: Steps (by position) that count 0 because the env gave no reward. Where
            it scores the whole in `evaluate`, that is as it should be; where it does not, a
            `reward` of 0 says nothing.
        failed_steps: Steps (by position) that count 0 because they failed.
        error: Why it ended early, with the provider's words; else `None`.
        error_kind: An `ApiErrorKind` or `ErrorKind` value; `unparsed_tool_call` for a call left as
            text and `content_filter` for a turn the provider cut (both a `stop`); `template`;
            `internal`.
        retryable: Whether another attempt may well succeed.
        tool_errors: Failed calls and steps, by kind.
        unparsed_tool_calls: Messages with a call left as text.
        timing: Seconds: `queued` (for a place), `reset`, `model`, `tools`, `evaluate`, `close`, and
            `total` without `queued`. From `MultiTurnRollout`: `model`, `tools`, `total` of the
            whole batch, and with `env_factory` `reset`, `evaluate`, `close` of the trajectory.
        usage: The server's token counts summed over the turns; `None` where it sent none.
        token_turns: One per model message. Only where log probabilities or `return_token_ids` were
            asked for.
        attempts: Only with `max_attempts` above 1: how often it was played. All else is of the last
            time, but `timing`, which has the seconds before that as `earlier`.
        earlier_errors: Only with `max_attempts` above 1: the `error` of each attempt before.
        close_error: Only where closing the env failed.
        trace_path: Only with `trace_dir`: the file, `None` where none was written.
        trace_error: Only where writing the trace failed.
    """

    turns: int
    stop_reason: str
    truncated: bool
    reward: float | None
    step_rewards: list[float]
    eval_reward: float | None
    reward_missing_steps: list[int]
    failed_steps: list[int]
    error: str | None
    error_kind: str | None
    retryable: bool
    tool_errors: dict[str, int]
    unparsed_tool_calls: int
    timing: dict[str, float]
    usage: dict[str, int] | None
    token_turns: NotRequired[list[TokenTurn]]
    attempts: NotRequired[int]
    earlier_errors: NotRequired[list[str]]
    close_error: NotRequired[str]
    trace_path: NotRequired[str | None]
    trace_error: NotRequired[str]


class SampledTrajectory(FinishedTrajectory):
    """What `MultiTurnRollout` returns: the model input as well, with whatever the template adds.

    Attributes:
        input_ids: The tokens, sampled ones as they were sampled.
        labels: Shifted as the template does it; -100 where nothing is learnt.
        logprobs: One entry per trained label, in order; `None` where the sampler gave none.
    """

    input_ids: list[int]
    labels: list[int]
    logprobs: list[Any] | None


def reward_of(
    toolbox: Toolbox, *, stop: StopReason, turns: int, eval_reward: float | None
) -> float | None:
    """Return the reward of a trajectory; `None` where there is none, as `FinishedTrajectory` says.

    Args:
        toolbox: Its steps.
        stop: Why it ended.
        turns: Messages the model wrote.
        eval_reward: What `evaluate` gave, if anything.
    """
    if stop.infrastructure or turns == 0 or not toolbox.has_env:
        return None
    return sum(toolbox.steps.rewards) + (eval_reward or 0.0)


def outcome_fields(
    toolbox: Toolbox,
    *,
    messages: Sequence[Mapping[str, Any]],
    turns: int,
    stop: StopReason,
    failure: Failure | None,
    reward: float | None,
    eval_reward: float | None,
    unparsed: int,
    timing: Mapping[str, float],
    usage: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Make the keys that every rollout adds to its input; `FinishedTrajectory` explains them."""
    steps = toolbox.steps
    return {
        "messages": list(messages),
        "turns": turns,
        "stop_reason": stop.value,
        "truncated": stop not in (StopReason.STOP, StopReason.ENV_DONE),
        "reward": reward,
        "step_rewards": list(steps.rewards),
        "eval_reward": eval_reward,
        "reward_missing_steps": list(steps.missing),
        "failed_steps": list(steps.failed),
        "error": None if failure is None else failure.text,
        "error_kind": None if failure is None else failure.kind,
        "retryable": failure is not None and failure.retryable,
        "tool_errors": dict(toolbox.errors),
        "unparsed_tool_calls": unparsed,
        "timing": dict(timing),
        "usage": dict(usage) if usage else None,
    }
