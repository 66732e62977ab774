"""The env of one trajectory, from its factory to its close, as both rollouts lead it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from twinkle_agentic._aio.bounded import Deadline, bounded
from twinkle_agentic._aio.threads import ThreadPool, run_blocking, use_pool
from twinkle_agentic.envs.base import Env, StepResult, overrides_evaluate
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.rollout.env_session import (
    add_observation,
    close_env,
    make_env,
    reset_env,
    score_env,
)
from twinkle_agentic.rollout.tool_turn import Toolbox, failure_in
from twinkle_agentic.rollout.types import (
    EnvFactory,
    Failure,
    Limits,
    ResetObservation,
    StopReason,
)
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["NO_TIMING", "EnvLife", "EnvPlan", "EnvThreads", "check_return"]

NO_TIMING: Mapping[str, float] = MappingProxyType({"reset": 0.0, "evaluate": 0.0, "close": 0.0})
"""The timing of a trajectory without an env of its own."""


class EnvThreads:
    """The threads of a rollout's envs, and which envs are in use; over all calls of the rollout.

    Args:
        max_threads: Of each kind.

    Attributes:
        reset: For making and resetting: resets that wait for room must not take the threads of the
            steps that make it.
        step: For steps and scoring.
        close: For closing.
        live_envs: Ids of the envs in use, to notice a factory that returns one twice.
    """

    def __init__(self, max_threads: int) -> None:
        self.reset = ThreadPool(max_threads)
        self.step = ThreadPool(max_threads)
        self.close = ThreadPool(max_threads)
        self.live_envs: set[int] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvPlan:
    """What the envs of all trajectories of one call share.

    Attributes:
        factory: Makes the env of a trajectory.
        limits: How long making, resetting, stepping, scoring and closing may take.
        reset_observation: Where the observation of `reset` goes.
        threads: Where all of that runs.
    """

    factory: EnvFactory
    limits: Limits
    reset_observation: ResetObservation
    threads: EnvThreads


class EnvLife:
    """One env: `open` it once, and `close` it whatever became of that.

    Args:
        plan: What it shares with the others.
        trajectory: The input; not changed.

    Attributes:
        close_error: Why the env may still be open; `None` where it is closed.
        timing: Seconds: `reset`, `evaluate`, `close`.
    """

    def __init__(self, plan: EnvPlan, trajectory: Mapping[str, Any]) -> None:
        self._plan = plan
        self._trajectory = trajectory
        self._env: Any = None
        self._first: StepResult | None = None
        self.close_error: str | None = None
        self.timing = dict(NO_TIMING)

    async def open(self, deadline: Deadline, *, queues: bool = True) -> Toolbox:
        """Make and reset the env and return its tools.

        Args:
            deadline: Of the trajectory; `reset_timeout_s` holds too.
            queues: Whether a leased env may wait for its slot beyond these limits, until its own:
                others are at work in the meantime, and give theirs back.

        Raises:
            EnvTimeoutError: It took too long.
            EnvError: The factory returned no env, or one that another trajectory is using.
            Exception: Whatever the factory, `reset` or `tools` raised.
        """
        own = Deadline(self._plan.limits.reset_timeout_s)
        started = time.monotonic()
        use_pool(self._plan.threads.reset)

        def left_s() -> float | None:
            return deadline.cap_s(own.left_s())

        try:
            await self._make(left_s())
            if queues:
                waited = await _wait_for_slot(self._env)
                own.postpone(waited)
                deadline.postpone(waited)
            return await self._begin(left_s)
        finally:
            use_pool(self._plan.threads.step)
            self.timing["reset"] += time.monotonic() - started

    async def _make(self, timeout_s: float | None) -> None:
        env = await make_env(
            self._plan.factory, self._trajectory, timeout_s=timeout_s, keep=self._keep
        )
        if id(env) in self._plan.threads.live_envs:
            raise EnvError(
                "env_factory returned an env that another trajectory is using: make one per "
                "trajectory"
            )
        self._plan.threads.live_envs.add(id(env))
        self._env = env

    def _keep(self, env: Any) -> None:
        self._env = env

    async def _begin(self, left_s: Callable[[], float | None]) -> Toolbox:
        env = self._env
        self._first = await reset_env(env, self._trajectory, timeout_s=left_s())
        use_pool(self._plan.threads.step)
        step_s = self._plan.limits.tool_timeout_s
        tools = await bounded(run_blocking(EnvTool.from_env, env, timeout_s=step_s), left_s())
        return Toolbox(ToolManager(tools, timeout_s=step_s))

    def ended_by_reset(self) -> tuple[StopReason, Failure | None] | None:
        """Return why the episode is over already after `reset`; `None` where it has begun."""
        if (failure := failure_in(self._first)) is not None:
            return StopReason.ENV_ERROR, failure
        return (StopReason.ENV_DONE, None) if self._first and self._first.done else None

    def show_first(self, messages: list[dict[str, Any]]) -> None:
        """Put the observation of `reset` where the model sees it."""
        observation = self._first.observation if self._first else ""
        if observation and self._plan.reset_observation != "ignore":
            add_observation(messages, observation, self._plan.reset_observation)

    @property
    def scores(self) -> bool:
        """Whether the env scores finished trajectories."""
        return self._env is not None and overrides_evaluate(self._env)

    async def score(self, trajectory: Mapping[str, Any]) -> float:
        """Let the env score its finished trajectory.

        Raises:
            EnvTimeoutError: No score within the limit.
            EnvError: Not exactly one finite number came back.
            Exception: Whatever `evaluate` raised.
        """
        started = time.monotonic()
        try:
            timeout_s = self._plan.limits.evaluate_timeout_s
            return await score_env(self._env, trajectory, timeout_s=timeout_s)
        finally:
            self.timing["evaluate"] += time.monotonic() - started

    async def close(self) -> None:
        """Close the env, if there is one; idempotent. A cancellation does not cut it short."""
        env, self._env = self._env, None
        if env is None:
            return
        started = time.monotonic()
        try:
            timeout_s = self._plan.limits.close_timeout_s
            self.close_error = await close_env(env, self._plan.threads.close, timeout_s=timeout_s)
        finally:
            self._plan.threads.live_envs.discard(id(env))
            self.timing["close"] += time.monotonic() - started


async def _wait_for_slot(env: Any) -> float:
    """Wait for the slot of a leased env, which has a limit of its own; return how long (s)."""
    if not isinstance(env, Env):
        return 0.0
    started = time.monotonic()
    await env.aacquire()
    return time.monotonic() - started


def check_return(total: float | None) -> Failure | None:
    """Return what is wrong with rewards whose sum is no number any more."""
    if total is None or math.isfinite(total):
        return None
    return Failure(f"the rewards of the episode add up to {total!r}", "env")
