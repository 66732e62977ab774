"""The interface of a rollout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_agentic.rollout.types import FinishedTrajectory

__all__ = ["Rollout"]


class Rollout(ABC):
    """Turns prompts into finished trajectories."""

    @abstractmethod
    def __call__(
        self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> Sequence[FinishedTrajectory]:
        """Roll out every trajectory.

        Args:
            trajectories: Prompts, or trajectories to continue. They are not changed.
            **kwargs: Overrides for this call.

        Returns:
            One finished trajectory for each input, in the same order.
        """
