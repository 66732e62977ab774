"""Which episode each slot of a pool is in, which are lost, and the requests of their calls."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.envs.errors import ErrorKind, PoolError
from twinkle_agentic.envs.openenv.pool._messages import Failure, Op, SlotRequest
from twinkle_agentic.tools.types import Trajectory, user_data_dict

__all__ = ["Episodes"]


class Episodes:
    """Knows the episodes of all slots as the driver sees them. One caller per slot at a time.

    Args:
        pool_size: Number of slots.
        step_timeout_s: Seconds a step may take.
        reset_timeout_s: Seconds a reset may take.

    Attributes:
        lost: Slot -> why its episode is lost, until its next reset.
        incarnations: Slot -> incarnation of the worker that started its episode.
        closed: The pool is closed.
    """

    def __init__(self, pool_size: int, *, step_timeout_s: float, reset_timeout_s: float) -> None:
        self.lost: dict[int, Failure] = {}
        self.incarnations: dict[int, int] = {}
        self.closed = False
        self._pool_size = pool_size
        self._step_timeout_s = step_timeout_s
        self._reset_timeout_s = reset_timeout_s
        self._numbers: dict[int, int] = {}  # slot -> how many resets were asked for

    def check_open(self) -> None:
        """Raise `PoolError` where the pool is closed."""
        if self.closed:
            raise PoolError("the pool is closed: make a new one")

    def reset_request(
        self,
        slot: int,
        trajectory: Trajectory | None = None,
        seed: int | None = None,
        reset_kwargs: Mapping[str, Any] | None = None,
        *,
        want_tools: bool = False,
    ) -> SlotRequest:
        """Make the request that starts an episode.

        Raises:
            IndexError: No such slot.
            PoolError: The pool is closed.
        """
        (slot,) = self.checked([slot])
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
        number = self._numbers[slot] = self._numbers.get(slot, 0) + 1
        args = (trajectory, want_tools)
        return SlotRequest("reset", slot, args, self._reset_timeout_s, None, number)

    def request(self, op: Op, slot: int, *args: Any) -> SlotRequest:
        """Make the request of a call in the running episode; raises as `reset_request`."""
        (slot,) = self.checked([slot])
        return self._request(op, slot, args)

    def step_request(
        self, slot: int, tool_name: str, arguments: Mapping[str, Any] | None
    ) -> SlotRequest:
        """Make the request that runs one action; raises as `reset_request`."""
        return self.request("step", slot, tool_name, dict(arguments or {}))

    def evaluate_request(
        self, slot: int, trajectories: Sequence[Trajectory], kwargs: Mapping[str, Any]
    ) -> SlotRequest:
        """Make the request that scores trajectories; raises as `reset_request`."""
        return self.request("evaluate", slot, (list(trajectories),), dict(kwargs))

    def step_requests(
        self,
        slots: Sequence[int],
        tool_names: Sequence[str],
        arguments_list: Sequence[Mapping[str, Any] | None],
    ) -> list[SlotRequest]:
        """Make the requests that run one action in each of many slots; raises as `checked`."""
        checked = self.checked(slots, tool_names=tool_names, arguments_list=arguments_list)
        return [
            self._request("step", slot, (tool_name, dict(arguments or {})))
            for slot, tool_name, arguments in zip(checked, tool_names, arguments_list, strict=True)
        ]

    def checked(self, slots: Iterable[int], **lists: Sequence[Any] | None) -> list[int]:
        """Return slots of this pool as `int`.

        Args:
            slots: Each once.
            **lists: What a batch has for each of them.

        Raises:
            IndexError: There is no such slot.
            ValueError: A slot occurs twice, or a list has another length.
            PoolError: The pool is closed.
        """
        self.check_open()
        checked = list(map(operator.index, slots))
        for slot in checked:
            if not 0 <= slot < self._pool_size:
                raise IndexError(f"slot {slot} is outside this pool: pool_size={self._pool_size}")
        for name, values in lists.items():
            if isinstance(values, str):
                raise ValueError(f"{name} must hold one entry per slot, found the text {values!r}")
            if values is not None and len(values) != len(checked):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(checked)} indices: one per slot"
                )
        if len(set(checked)) < len(checked):
            twice = sorted(slot for slot, count in Counter(checked).items() if count > 1)
            raise ValueError(f"indices must name each slot once, found {twice} more than once")
        return checked

    def note(self, request: SlotRequest, value: Any, incarnation: int) -> None:
        """Take note of what the reply to a request says about its episode."""
        slot = request.slot
        if isinstance(value, Failure):
            lasting = value.worker_lost or value.kind == ErrorKind.TIMEOUT
            if lasting or request.op in ("reset", "step"):
                self.note_lost(request, value)
        elif request.op == "reset" and self._is_current(request):
            self.lost.pop(slot, None)
            self.incarnations[slot] = incarnation

    def note_lost(self, request: SlotRequest, failure: Failure) -> None:
        """Take note that the episode of a request is lost, unless its slot was reset since."""
        if self._is_current(request):
            self.lost[request.slot] = failure

    def _is_current(self, request: SlotRequest) -> bool:
        return request.episode == self._numbers.get(request.slot, 0)

    def _request(self, op: Op, slot: int, args: tuple[Any, ...]) -> SlotRequest:
        incarnation, number = self.incarnations.get(slot), self._numbers.get(slot, 0)
        return SlotRequest(op, slot, args, self._step_timeout_s, incarnation, number)
