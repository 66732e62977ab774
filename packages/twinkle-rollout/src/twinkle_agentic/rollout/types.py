"""The words of a rollout's output, and its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NotRequired, TypedDict

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic.tools.types import Trajectory, user_data_dict

__all__ = [
    "BrokenCallAnswer",
    "EnvFactory",
    "Failure",
    "FinishedTrajectory",
    "Limits",
    "ResetObservation",
    "StopReason",
    "TokenTrajectory",
    "TokenTurn",
    "user_data_of",
]

EnvFactory = Callable[[Any], Any]
"""Makes the env of one trajectory; a plain function (run in a thread) or a coroutine function."""

ResetObservation = Literal["append", "message", "ignore"]
"""Where the observation of `reset` goes: the last user message, one of its own, nowhere."""


BrokenCallAnswer = Literal["answer", "end"]
"""What follows a tool call that cannot be read: an error for the model, or the end."""


class StopReason(StrEnum):
    """Why a trajectory ended; the value of its `stop_reason`."""

    STOP = "stop"
    """The model answered without calling a tool."""
    LENGTH = "length"
    """A turn was cut at its limit, or the context or `max_trajectory_tokens` is full."""
    MAX_TURNS = "max_turns"
    """`max_turns` model messages."""
    ENV_DONE = "env_done"
    """The environment ended the episode."""
    ENV_TRUNCATED = "env_truncated"
    """The environment cut the episode at a limit of its own (`info["truncated"]`)."""
    DEADLINE = "deadline"
    """`deadline_s` passed."""
    API_ERROR = "api_error"
    """The model endpoint failed; says nothing about the model."""
    ENV_ERROR = "env_error"
    """The environment failed or was lost; says nothing about the model."""

    @property
    def truncates(self) -> bool:
        """Whether the trajectory did not end by itself."""
        return self not in (StopReason.STOP, StopReason.ENV_DONE)

    @property
    def is_infrastructure(self) -> bool:
        """Whether a failure that is not the agent's ended it; there is no reward then."""
        return self in (StopReason.API_ERROR, StopReason.ENV_ERROR)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a trajectory ended early.

    Attributes:
        text: What happened.
        kind: The `error_kind` of the trajectory (`FinishedTrajectory`).
        retryable: Whether a new attempt may well succeed.
    """

    text: str
    kind: str
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how far one trajectory may go; seconds, `None` for no limit.

    Attributes:
        max_turns: Model messages.
        max_trajectory_tokens: Tokens of prompt and replies together, by the server's count.
        deadline_s: The whole of it, from the making of the env to the last tool result. Scoring and
            closing follow with limits of their own.
        request_timeout_s: One request to the model with all its retries; `None` leaves it to the
            client.
        tool_timeout_s: One tool call.
        reset_timeout_s: Making and resetting the env.
        evaluate_timeout_s: Scoring.
        close_timeout_s: Closing the env.
    """

    max_turns: int = 6
    max_trajectory_tokens: int | None = None
    deadline_s: float | None = None
    request_timeout_s: float | None = None
    tool_timeout_s: float | None = 600.0
    reset_timeout_s: float | None = 600.0
    evaluate_timeout_s: float | None = 600.0
    close_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_count("max_turns", self.max_turns)
        check_count("max_trajectory_tokens", self.max_trajectory_tokens, allow_none=True)
        for name in (
            "deadline_s",
            "request_timeout_s",
            "tool_timeout_s",
            "reset_timeout_s",
            "evaluate_timeout_s",
        ):
            check_limit(name, getattr(self, name), allow_none=True)
        check_limit("close_timeout_s", self.close_timeout_s)


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
        error_kind: An `ApiErrorKind` or `ErrorKind` value; for a `stop` `unparsed_tool_call` (a
            call that could not be read), `empty_reply` (all text is in the reasoning) or
            `content_filter` (the provider cut the turn); `template`; `internal`.
        retryable: Whether another attempt may well succeed.
        tool_errors: Failed calls and steps, by kind.
        unparsed_tool_calls: Messages with a call left as text or in the reasoning, or dropped by
            the parser.
        timing: Seconds: `queued` (for a place), `reset`, `model`, `tools`, `evaluate`, `close`, and
            `total` without `queued`. In `MultiTurnRollout` `model` includes the wait for the others
            of the batch.
        turn_timings: One per model message: seconds of `model` and `tools`, and of `paused` where
            the rollout was paused before it (which `model` leaves out, here and in `timing`).
        policy_versions: One per model message: the `policy_version` of the rollout when it was
            asked for. Only where one was set.
        group_id: Only with `group_size` above 1: which trajectories are samples of one input. The
            input's own `group_id`, else its number in the call.
        sample: Only with `group_size` above 1: which sample of its group this is, from 0.
        usage: The server's token counts summed over the turns; `None` where it sent none.
        token_turns: One per model message. Only where log probabilities or `return_token_ids` were
            asked for.
        attempts: Only with `max_attempts` above 1: how often it was played. All else is of the last
            time, but `timing`, which has the seconds before that as `earlier`.
        earlier_errors: Only with `max_attempts` above 1: the `error` of each attempt before.
        reasoning_dropped: Only where the endpoint refused the reasoning of earlier turns, which was
            left out of the requests then.
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
    turn_timings: list[dict[str, float]]
    policy_versions: NotRequired[list[Any]]
    group_id: NotRequired[Any]
    sample: NotRequired[int]
    usage: dict[str, int] | None
    token_turns: NotRequired[list[TokenTurn]]
    attempts: NotRequired[int]
    earlier_errors: NotRequired[list[str]]
    reasoning_dropped: NotRequired[bool]
    close_error: NotRequired[str]
    trace_path: NotRequired[str | None]
    trace_error: NotRequired[str]


class TokenTrajectory(FinishedTrajectory):
    """What `MultiTurnRollout` returns: the model input as well, with whatever the template adds.

    Attributes:
        input_ids: The tokens, sampled ones as they were sampled.
        labels: Shifted as the template does it; -100 where nothing is learnt.
        logprobs: One entry per trained label, in order; `None` where the sampler gave none.
    """

    input_ids: list[int]
    labels: list[int]
    logprobs: list[Any] | None


def user_data_of(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task data of a trajectory; empty where it is unreadable."""
    try:
        return user_data_dict(trajectory)
    except ValueError:
        return {}
