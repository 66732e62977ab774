"""The words of a rollout's output, and its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic.tools.types import user_data_dict

__all__ = [
    "EnvFactory",
    "Failure",
    "Limits",
    "ResetObservation",
    "StopReason",
    "user_data_of",
]

EnvFactory = Callable[[Any], Any]
"""Makes the env of one trajectory; a plain function (run in a thread) or a coroutine function."""

ResetObservation = Literal["append", "message", "ignore"]
"""Where the observation of `reset` goes: the last user message, one of its own, nowhere."""


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
    DEADLINE = "deadline"
    """`deadline_s` passed."""
    API_ERROR = "api_error"
    """The model endpoint failed; says nothing about the model."""
    ENV_ERROR = "env_error"
    """The environment failed or was lost; says nothing about the model."""

    @property
    def infrastructure(self) -> bool:
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


def user_data_of(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task data of a trajectory; empty where it is unreadable."""
    try:
        return user_data_dict(trajectory)
    except ValueError:
        return {}
