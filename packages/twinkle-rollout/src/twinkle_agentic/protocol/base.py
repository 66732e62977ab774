"""The interface of a model endpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from twinkle_agentic.tools.types import Message, Trajectory

__all__ = ["API"]


class API(ABC):
    """Turns a trajectory so far into the next assistant message.

    A subclass gives `__call__`; a rollout runs that in a thread. One that can await also gives
    `acomplete(trajectory, sampling_params, *, timeout_s, **kwargs) -> Completion`, as
    `twinkle_agentic.protocol.openai.OpenAI` does, and costs no thread then.
    """

    @abstractmethod
    def __call__(
        self, trajectory: Trajectory, sampling_params: Any, **kwargs: Any
    ) -> Message | list[Message]:
        """Ask for the next message.

        Args:
            trajectory: `messages` and, where there are any, `tools`.
            sampling_params: An object with the attributes of `SamplingParams`.
            **kwargs: Further fields of the request; `extra_body` is merged into it.

        Returns:
            The assistant message, with `finish_reason` where the server gave one; a list of them
            for `num_samples` above 1.

        Raises:
            Exception: Whatever went wrong; the rollout ends this trajectory as `api_error`.
        """
