"""One slot of a pool as a plain `Env`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import PoolError
from twinkle_agentic.envs.openenv.pool._driver import SlotDriver
from twinkle_agentic.envs.openenv.pool._leases import Leases
from twinkle_agentic.envs.openenv.pool._messages import SlotRequest, as_result, value_or_raise
from twinkle_agentic.tools.types import ToolInfo, Trajectory

__all__ = ["EnvPoolAdapter", "ScoringAdapter"]


class EnvPoolAdapter(Env):
    """Proxies one slot: from `EnvPool.get_adapters` for good, from `EnvPool.lease` until `close`.

    `step` never raises: what went wrong is a result with `done=True` and `info["error"]`. `close`
    leaves the environment to the pool; it gives a leased slot back, also when the adapter is
    forgotten. Used by one caller at a time; not picklable.

    Args:
        driver: Of the pool.
        leases: Of the pool.
        slot: The slot; `None` leases one, now if one is free and no other caller waits, else in the
            first `reset`.
        lease_timeout_s: Seconds `reset` waits for a slot.

    Attributes:
        slot: Index in the pool; `None` while no slot is held.
        episode_reward: The return so far.

    Example:
        >>> with pool.lease() as env:
        ...     env.reset()
        ...     result = env.step("play", {"action": "hit"})
    """

    def __init__(
        self,
        driver: SlotDriver,
        leases: Leases,
        slot: int | None = None,
        *,
        lease_timeout_s: float,
    ) -> None:
        self.slot = slot
        self.episode_reward = 0.0
        self._driver = driver
        self._leases = leases
        self._leased = slot is None
        self._released = False
        self._lease_timeout_s = lease_timeout_s
        self._tools: list[ToolInfo] | None = None
        self._forgotten: weakref.finalize[..., Any] | None = None
        if self._leased:
            self._hold(leases.try_acquire())

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode in the slot, waiting for a slot first where none is held.

        Raises:
            PoolError: No slot became free in time, the lease was given back, or the pool is closed.
            EnvError: The environment raised.
            EnvTimeoutError: It did not answer in time.
            WorkerLostError: Its worker died and was not back in time.
        """
        if self._needs_slot():
            self._hold(self._leases.acquire(self._lease_timeout_s))
        return self._started(self._driver.call(self._reset_request(trajectory)))

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode without blocking the event loop; as `reset`."""
        await self.aacquire()
        return self._started(await self._driver.acall(self._reset_request(trajectory)))

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one action; every failure is a result with `done=True` and `info["error"]`."""
        try:
            request = self._driver.episodes.step_request(self._held(), tool_name, arguments)
            return self._stepped(as_result(self._driver.call(request)))
        except Exception as error:
            return self._failed(error)

    async def astep(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one action without blocking the event loop; as `step`."""
        try:
            request = self._driver.episodes.step_request(self._held(), tool_name, arguments)
            return self._stepped(as_result(await self._driver.acall(request)))
        except Exception as error:
            return self._failed(error)

    def tools(self) -> list[ToolInfo]:
        """Return the definitions given in the last `reset`; before the first, those of the pool."""
        if self._tools is None:
            self._tools = self._driver.tools(self.slot)
        return list(self._tools)

    async def aacquire(self) -> None:
        """Wait for the slot of this lease where none is held yet.

        Raises:
            PoolError: No slot became free in time, the lease was given back, or the pool is closed.
        """
        if self._needs_slot():
            self._hold(await self._leases.aacquire(self._lease_timeout_s))

    def close(self) -> None:
        """Give a leased slot back; do nothing else, for the pool closes the environments."""
        if not self._leased:
            return
        self._released = True
        slot, self.slot = self.slot, None
        if slot is not None and self._forgotten is not None:
            self._forgotten.detach()
            self._leases.release(slot)

    async def aclose(self) -> None:
        """Give a leased slot back; as `close`, which does not block."""
        self.close()

    def _needs_slot(self) -> bool:
        if self._released:
            raise PoolError("the lease was given back: take another with pool.lease()")
        return self.slot is None

    def _hold(self, slot: int | None) -> None:
        if slot is None:
            return
        self.slot = slot
        # A finalizer may run while this thread holds any lock: it leaves the work to another one.
        loop, release = background_loop(), self._leases.release
        self._forgotten = weakref.finalize(self, loop.call_soon_threadsafe, release, slot)
        self._forgotten.atexit = False

    def _held(self) -> int:
        if self.slot is None:
            raise PoolError(
                "the lease was given back: take another with pool.lease()"
                if self._released
                else "no episode is running: reset the env first"
            )
        return self.slot

    def _reset_request(self, trajectory: Trajectory | None) -> SlotRequest:
        self.episode_reward = 0.0
        self._tools = None
        return self._driver.episodes.reset_request(self._held(), trajectory, want_tools=True)

    def _started(self, value: Any) -> StepResult:
        result, self._tools = value_or_raise(value)
        return result

    def _stepped(self, result: StepResult) -> StepResult:
        if "episode_reward" in result.info:
            self.episode_reward = float(result.info["episode_reward"])
        else:  # the worker could not say; what was earned before stays
            result.info["episode_reward"] = self.episode_reward
        return result

    def _failed(self, error: Exception) -> StepResult:
        return StepResult.failed(error, episode_reward=self.episode_reward)


class ScoringAdapter(EnvPoolAdapter):
    """The adapter of environments that score trajectories, so that others do not seem to."""

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories with the environment of the slot.

        Raises:
            TwinkleEnvError: The environment raised, did not answer in time, or is lost.
        """
        request = self._driver.episodes.evaluate_request(self._held(), trajectories, kwargs)
        return list(value_or_raise(self._driver.call(request)))

    async def aevaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories without blocking the event loop; as `evaluate`."""
        request = self._driver.episodes.evaluate_request(self._held(), trajectories, kwargs)
        return list(value_or_raise(await self._driver.acall(request)))
