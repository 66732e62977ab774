"""The running episode of one adapter: what was earned, and whether it can be stepped."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import ErrorKind

__all__ = ["Episode"]


@dataclass(slots=True)
class Episode:
    """Where an episode stands.

    Attributes:
        reward: Sum of the rewards of its steps.
        done: The environment ended it.
        lost: Why there is no episode (any more); `None` while there is one.
        lost_kind: The class of that failure.
        retryable: Whether a new episode may well succeed.
    """

    reward: float = 0.0
    done: bool = False
    lost: str | None = "no episode has been started: call reset first"
    lost_kind: ErrorKind = ErrorKind.SESSION_LOST
    retryable: bool = True
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def begin(self, *, done: bool) -> None:
        """Start anew."""
        self.reward, self.done, self.lost = 0.0, done, None

    def lose(
        self,
        reason: str,
        *,
        kind: ErrorKind = ErrorKind.SESSION_LOST,
        retryable: bool = True,
    ) -> None:
        """Take note that the state of the environment is unknown."""
        self.lost, self.lost_kind, self.retryable = reason, kind, retryable

    def refusal(self) -> StepResult | None:
        """Return the result of a step that must not be taken; `None` where it may."""
        if self.lost is not None:
            return StepResult.failed(
                f"there is no episode to step, call reset: {self.lost}",
                kind=self.lost_kind,
                retryable=self.retryable,
                episode_reward=self.reward,
            )
        if self.done:
            return StepResult.failed(
                "the episode is over, nothing was executed: call reset for the next one",
                kind=ErrorKind.TOOL,
                episode_reward=self.reward,
            )
        return None

    def failed(self, error: BaseException | str, *, kind: ErrorKind | None = None) -> StepResult:
        """Make the result of a step that failed and left the episode alive."""
        return StepResult.failed(error, kind=kind, done=False, episode_reward=self.reward)

    def scored(
        self, observation: str, reward: Any, *, done: bool, info: dict[str, Any]
    ) -> StepResult:
        """Make the result of a step and add its reward; a failed step earns nothing."""
        result = StepResult.scored(observation, reward, done=done, info=info)
        with self._adding:  # threads may step one env at once
            if result.error is None:
                self.reward += result.reward
            self.done = self.done or result.done
            result.info["episode_reward"] = self.reward
        return result
