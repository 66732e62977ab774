"""The record of a finished trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from twinkle_agentic.rollout.types import Failure, StopReason
from twinkle_agentic.tools.types import Trajectory

if TYPE_CHECKING:
    from twinkle_agentic.rollout.tool_turn import Toolbox

__all__ = ["FinishedTrajectory", "SampledTrajectory", "TokenTurn", "outcome_fields"]


class TokenTurn(TypedDict):
    """The tokens of one turn, as the server reported them."""

    turn: int
    """From 1."""
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    logprobs: list[float] | None
    """One per id of `token_ids`."""
    problem: str | None
    """Why a trainer must not use the turn (missing, lengths differ, no numbers); else `None`."""


class FinishedTrajectory(Trajectory):
    """What a rollout returns for one input: a plain dict, the input with these keys added.

    `messages` is the whole conversation. What the rollout adds to it can be continued: unique call
    ids, arguments that are JSON objects, every call answered. The messages it was given stay as
    they are; what is sent of them is repaired. `tools` is what the model was offered.
    """

    turns: int
    """Model messages."""
    stop_reason: str
    """A `StopReason` value."""
    truncated: bool
    """It did not end by itself (`stop`, `env_done`)."""
    reward: float | None
    """The step rewards of the env together with `eval_reward`; `None` after `api_error` or
    `env_error`, where no turn was completed, where there is no env, and where the env scores
    trajectories itself but was cut by the deadline in the middle of a step."""
    step_rewards: list[float]
    """One per step of the env. The reward of `reset` is not counted."""
    eval_reward: float | None
    """What `evaluate` gave; `None` where the env does not override it, or did not get to it."""
    reward_missing_steps: list[int]
    """Steps (by position) that count 0 because the env gave no reward. Where it scores the whole in
    `evaluate`, that is as it should be; where it does not, a `reward` of 0 says nothing."""
    failed_steps: list[int]
    """Steps (by position) that count 0 because they failed."""
    error: str | None
    """Why it ended early, with the provider's words."""
    error_kind: str | None
    """An `ApiErrorKind` or `ErrorKind` value; `unparsed_tool_call` for a call left as text and
    `content_filter` for a turn the provider cut (both a `stop`); `template`; `internal`."""
    retryable: bool
    """Whether another attempt may well succeed."""
    tool_errors: dict[str, int]
    """Failed calls and steps, by kind."""
    unparsed_tool_calls: int
    """Messages with a call left as text."""
    timing: dict[str, float]
    """Seconds: `queued` (for a place), `reset`, `model`, `tools`, `evaluate`, `close`, and `total`
    without `queued`. From `MultiTurnRollout`: `model`, `tools`, `total` of the whole batch, and
    with `env_factory` `reset`, `evaluate`, `close` of the trajectory."""
    usage: dict[str, int] | None
    """The server's token counts summed over the turns; `None` where it sent none."""
    token_turns: NotRequired[list[TokenTurn]]
    """Only where log probabilities or `return_token_ids` were asked for."""
    close_error: NotRequired[str]
    """Only where closing the env failed."""
    trace_path: NotRequired[str | None]
    """Only with `trace_dir`: the file, `None` where none was written."""
    trace_error: NotRequired[str]
    """Only where writing the trace failed."""


class SampledTrajectory(FinishedTrajectory):
    """What `MultiTurnRollout` returns: the model input as well, with whatever the template adds."""

    input_ids: list[int]
    """The tokens, sampled ones as they were sampled."""
    labels: list[int]
    """Shifted as the template does it; -100 where nothing is learnt."""
    logprobs: list[Any] | None
    """One entry per trained label, in order; `None` where the sampler gave none."""


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
