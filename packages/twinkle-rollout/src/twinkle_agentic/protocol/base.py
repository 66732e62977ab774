"""The interface of a model endpoint."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.protocol._reply import Completion, completion_of
from twinkle_agentic.tools.types import Message, Trajectory

__all__ = ["API"]


class API(ABC):
    """Turns a trajectory so far into the next assistant message.

    A subclass gives `__call__`; a rollout runs that in a thread. One that can await overrides
    `acomplete`, as `twinkle_agentic.protocol.openai.OpenAI` does, and costs no thread then.

    Attributes:
        timeout_s: Seconds one request may take with its retries; `None` leaves it to the rollout.
        bounds_itself: `acomplete` ends soon after its limit or a cancellation, and changes nothing
            of what it is given: a rollout need not guard it.
        sends_finish_reason: Every complete message has a `finish_reason`, so that one without it
            may have been cut.
    """

    timeout_s: float | None = None
    bounds_itself: bool = False
    sends_finish_reason: bool = False

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

    async def acomplete(
        self,
        trajectory: Trajectory,
        sampling_params: Any,
        *,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Completion:
        """Ask for the next message without blocking the event loop; by default in a thread.

        Args:
            trajectory: As for a call.
            sampling_params: As for a call.
            timeout_s: Seconds for the request with its retries; the default leaves it to the
                caller, which stops to wait.
            **kwargs: As for a call.
        """
        reply: Any = await run_blocking(self, trajectory, sampling_params, **kwargs)
        return completion_of(await reply if inspect.isawaitable(reply) else reply)

    def lease(self) -> AbstractAsyncContextManager[Any]:
        """Keep connections open inside an `async with` block; by default there are none."""
        return nullcontext()
