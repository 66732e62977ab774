"""The environment an agent acts on, and the result of a step."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from twinkle_agentic.envs.errors import ErrorKind, TwinkleEnvError
from twinkle_agentic.tools.threads import run_blocking
from twinkle_agentic.tools.types import ToolInfo, Trajectory

__all__ = ["Env", "StepResult", "episode_number"]


@dataclass
class StepResult:
    """What the environment answered to a reset or a step.

    Attributes:
        observation: Text the model sees next.
        reward: Of this step, in the environment's own unit; 0.0 with `info["reward_missing"]` where the
            environment gave none.
        done: The episode is over: terminated, truncated or lost; `info` says which.
        info: Anything else. Keys with a fixed meaning: `episode_reward` (float, the return so far), `error`
            (non-empty text: this step failed and its reward means nothing), `error_kind` (an `ErrorKind`
            value), `retryable` (bool), `reward_missing` (bool), `metadata` (dict).
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def error(self) -> str | None:
        """The error text of a failed step, `None` of one that worked."""
        return self.info.get("error") or None

    @classmethod
    def failed(
        cls,
        error: BaseException | str,
        *,
        kind: ErrorKind | str | None = None,
        done: bool = True,
        retryable: bool | None = None,
        observation: str | None = None,
        **info: Any,
    ) -> StepResult:
        """Make the result of a step that failed.

        Args:
            error: The exception, or the text.
            kind: The class of the failure; by default the exception's own `kind`, else `env`.
            done: True where the episode is gone, False where it goes on.
            retryable: Whether a new episode may well succeed; by default the exception's own.
            observation: What the model sees; by default `Error: <text>`.
            **info: Further keys of `info`.
        """
        if isinstance(error, TwinkleEnvError):
            kind = error.kind if kind is None else kind
            retryable = error.retryable if retryable is None else retryable
        text = error if isinstance(error, str) else (str(error) or type(error).__name__)
        if not isinstance(error, (str, TwinkleEnvError)):
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls(
            observation=f"Error: {text}" if observation is None else observation,
            reward=0.0,
            done=done,
            info={
                "error": text or "unknown error",
                "error_kind": str(ErrorKind.ENV if kind is None else kind),
                "retryable": bool(retryable),
                **info,
            },
        )

    @classmethod
    def scored(
        cls,
        observation: str,
        reward: Any,
        *,
        done: bool = False,
        info: dict[str, Any] | None = None,
    ) -> StepResult:
        """Make a result from a reward of any origin, so that no wrong number passes as one.

        Args:
            observation: Text the model sees next.
            reward: A number (numpy scalars and booleans too); `None` becomes 0.0 with
                `info["reward_missing"]`. NaN, infinities and everything else make the step a failed one
                (`error_kind` `env`), still with the observation.
            done: The episode is over.
            info: Further keys.
        """
        details = dict(info or {})
        if reward is None:
            return cls(observation, 0.0, bool(done), {**details, "reward_missing": True})
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            details.update(
                error=f"the environment gave the reward {reward!r}, which is not a finite number",
                error_kind=str(ErrorKind.ENV),
                retryable=False,
            )
            return cls(observation, 0.0, bool(done), details)
        return cls(observation, number, bool(done), details)


class Env(ABC):
    """One object an agent acts on, one episode at a time: `reset`, `step` until done, `close`.

    A subclass gives `step`, usually `reset` and `tools`, and `close` where it holds a resource. The methods
    are synchronous; each has an async twin (`areset`, `astep`, `aevaluate`, `aclose`) which by default runs
    it in a thread of the running rollout, so a blocking environment is fine. An adapter that
    speaks a network protocol overrides the twins with coroutines. An env is used by one caller at a time; it is a
    context manager, sync and async.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("reset", "areset"):
            if name in cls.__dict__:
                setattr(cls, name, _counted(cls.__dict__[name]))

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode.

        Args:
            trajectory: The one about to be rolled out; its `user_data` may hold `seed`, `episode_id` and
                whatever else the environment takes.

        Returns:
            The first observation; empty by default.

        Raises:
            TwinkleEnvError: No episode could be started.
        """
        return StepResult()

    @abstractmethod
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Run one action.

        Args:
            tool_name: A name from `tools()`; anything else is an observation of the error.
            arguments: The action's arguments, JSON values.

        Returns:
            Observation, reward, done. A step that failed says so in `info["error"]`.
        """

    def tools(self) -> list[ToolInfo]:
        """Return the definitions of the actions; empty where there is only one, untyped."""
        return []

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories, one reward each, in order; zeros by default."""
        return [0.0] * len(trajectories)

    def close(self) -> None:
        """Release everything the env holds; calling it again does nothing."""
        return None

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode without blocking the event loop; as `reset`."""
        return await run_blocking(self.reset, trajectory)

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Run one action without blocking the event loop; as `step`."""
        return await run_blocking(self.step, tool_name, arguments)

    async def aevaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories without blocking the event loop; as `evaluate`."""
        return await run_blocking(self.evaluate, trajectories, **kwargs)

    async def aclose(self) -> None:
        """Release everything without blocking the event loop; as `close`."""
        await run_blocking(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def episode_number(env: Any) -> int:
    """Tell episodes of one env apart: the number changes with each `reset` or `areset`."""
    return getattr(env, "_episode_number", 0)


def _counted(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `reset` count itself, so that the tools of an env notice a new episode."""

    @functools.wraps(reset)
    def counted(self: Env, *args: Any, **kwargs: Any) -> Any:
        self._episode_number = episode_number(self) + 1  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        return reset(self, *args, **kwargs)

    return counted
