"""Base types of an environment, equal to those of OpenEnv, which need not be installed.

An environment that imports `openenv` is served as well: the server only calls what is named here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Action", "Environment", "Observation", "State"]


class Action(BaseModel):
    """What a client sends in a step."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    metadata: dict[str, Any] = Field(default_factory=dict, description="Anything else to say.")


class Observation(BaseModel):
    """What a client gets back."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    done: bool = Field(default=False, description="Whether the episode has ended.")
    reward: bool | int | float | None = Field(default=None, description="Reward of the action.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Anything else to say.")


class State(BaseModel):
    """Where an episode stands."""

    model_config = ConfigDict(extra="allow", validate_assignment=True)

    episode_id: str | None = Field(default=None, description="Name of the episode.")
    step_count: int = Field(default=0, ge=0, description="Steps taken in it.")


_ActionT = TypeVar("_ActionT")
_ObservationT = TypeVar("_ObservationT")
_StateT = TypeVar("_StateT")


class Environment(ABC, Generic[_ActionT, _ObservationT, _StateT]):
    """What is served: one object per session, used by one thread at a time."""

    SUPPORTS_CONCURRENT_SESSIONS = False

    @abstractmethod
    def reset(self, seed: int | None = None, episode_id: str | None = None) -> _ObservationT:
        """Start an episode."""

    @abstractmethod
    def step(self, action: _ActionT) -> _ObservationT:
        """Take one step."""

    @property
    @abstractmethod
    def state(self) -> _StateT:
        """Where the episode stands."""

    def close(self) -> None:  # an environment that holds nothing has nothing to close
        """Give back what the environment holds."""
