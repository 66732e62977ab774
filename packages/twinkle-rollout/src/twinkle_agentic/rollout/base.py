"""The interface of a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from twinkle_agentic.tools.types import Trajectory

__all__ = ["Rollout"]


class Rollout(ABC):
    """Turns prompts into finished trajectories."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Roll out every trajectory.

        Args:
            trajectories: Prompts, or trajectories to continue. They are not changed.
            **kwargs: Overrides for this call.

        Returns:
            One finished trajectory for each input, in the same order.
        """
