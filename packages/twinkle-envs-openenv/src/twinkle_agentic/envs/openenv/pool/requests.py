"""Checks what callers pass to a pool and turns it into slot requests."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.envs.errors import PoolError
from twinkle_agentic.envs.openenv.pool.driver import SlotDriver
from twinkle_agentic.envs.openenv.pool.stragglers import Stragglers
from twinkle_agentic.envs.openenv.pool.wire import SlotRequest
from twinkle_agentic.tools.types import Trajectory, user_data_dict

__all__ = ["RequestMaker"]


class RequestMaker:
    """Makes the requests of one pool."""

    def __init__(
        self,
        pool_size: int,
        driver: SlotDriver,
        stragglers: Stragglers,
        *,
        step_timeout_s: float,
        reset_timeout_s: float,
    ) -> None:
        self._pool_size = pool_size
        self._driver = driver
        self._stragglers = stragglers
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._closed = False

    def close(self) -> None:
        """Refuse all further requests."""
        self._closed = True

    def check_open(self) -> None:
        """Raise `PoolError` where the pool is closed."""
        if self._closed:
            raise PoolError("the pool is closed: make a new one")

    def checked(self, slot: int) -> int:
        """Return a slot of this pool as an `int`.

        Raises:
            IndexError: There is no such slot.
        """
        slot = operator.index(slot)
        if not 0 <= slot < self._pool_size:
            raise IndexError(f"slot {slot} is outside this pool: pool_size={self._pool_size}")
        return slot

    def reset(
        self,
        slot: int,
        trajectory: Trajectory | None = None,
        seed: int | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        *,
        want_tools: bool = False,
    ) -> SlotRequest:
        """Make the request that starts an episode; a result not collected yet is dropped."""
        self.check_open()
        slot = self.checked(slot)
        self._stragglers.forget(slot)
        extra = dict(reset_kwargs or {})
        if seed is not None:
            extra["seed"] = seed
        if extra:
            user_data = {**user_data_dict(trajectory), **extra}
            nested: Any = user_data.get("reset_kwargs") or {}
            if reset_kwargs and isinstance(nested, Mapping):
                # Asked for by name, so an OpenEnv environment must take them.
                known = cast("Mapping[str, Any]", nested)
                user_data["reset_kwargs"] = {**known, **reset_kwargs}
            trajectory = {**(trajectory or {}), "user_data": user_data}
        return SlotRequest(
            op="reset",
            slot=slot,
            args=(trajectory, want_tools),
            timeout_s=self._reset_timeout_s,
            episode=self._driver.next_episode(slot),
        )

    def step(self, slot: int, tool_name: str, arguments: Mapping[str, Any] | None) -> SlotRequest:
        """Make the request that runs one action."""
        self.check_open()
        slot = self.checked(slot)
        if self._stragglers.holds(slot):
            raise PoolError(
                f"slot {slot} has a step from an earlier batch whose result was not collected: "
                "call collect(), or reset the slot"
            )
        return SlotRequest(
            op="step",
            slot=slot,
            args=(tool_name, dict(arguments or {})),
            timeout_s=self._step_timeout_s,
            incarnation=self._driver.episodes.get(slot),
            episode=self._driver.episode_of(slot),
        )

    def tools(self, slot: int) -> SlotRequest:
        """Make the request for the tool definitions of a slot."""
        return self._other("tools", slot, ((), {}))

    def evaluate(
        self, slot: int, trajectories: Sequence[Trajectory], kwargs: Mapping[str, Any]
    ) -> SlotRequest:
        """Make the request that scores trajectories."""
        return self._other("evaluate", slot, ((list(trajectories),), dict(kwargs)))

    def reset_batch(
        self,
        slots: Sequence[int],
        trajectories: Sequence[Trajectory | None] | None,
        seeds: Sequence[int | None] | None,
        reset_kwargs: Mapping[str, Any],
    ) -> list[SlotRequest]:
        """Make the requests that start episodes in many slots."""
        slots = self._checked_batch(slots, trajectories=trajectories, seeds=seeds)
        return [
            self.reset(
                slot,
                None if trajectories is None else trajectories[position],
                None if seeds is None else seeds[position],
                reset_kwargs,
            )
            for position, slot in enumerate(slots)
        ]

    def step_batch(
        self,
        slots: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any]],
    ) -> list[SlotRequest]:
        """Make the requests that run one action in each of many slots."""
        slots = self._checked_batch(slots, tool_names=tool_names, arguments_list=arguments_list)
        return [
            self.step(slot, tool_name, arguments)
            for slot, tool_name, arguments in zip(slots, tool_names, arguments_list, strict=True)
        ]

    def _other(self, op: Any, slot: int, args: tuple[Any, ...]) -> SlotRequest:
        self.check_open()
        slot = self.checked(slot)
        return SlotRequest(
            op=op,
            slot=slot,
            args=args,
            timeout_s=self._step_timeout_s,
            incarnation=self._driver.episodes.get(slot),
            episode=self._driver.episode_of(slot),
        )

    def _checked_batch(self, slots: Sequence[int], **lists: Sequence[Any] | None) -> list[int]:
        checked = [self.checked(slot) for slot in slots]
        for name, values in lists.items():
            if isinstance(values, str):
                raise ValueError(f"{name} must hold one entry per slot, found the text {values!r}")
            if values is not None and len(values) != len(checked):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(checked)} indices: one per slot"
                )
        if twice := sorted(slot for slot, count in Counter(checked).items() if count > 1):
            raise ValueError(f"indices must name each slot once, found {twice} more than once")
        return checked
