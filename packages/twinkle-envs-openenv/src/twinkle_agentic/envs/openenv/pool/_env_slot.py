"""One environment of a slot and the thread it lives in: made on first use, stepped, closed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from twinkle_agentic._aio.bounded import finish
from twinkle_agentic.envs.base import Env, StepResult, as_step_result, overrides_evaluate
from twinkle_agentic.envs.openenv.pool._messages import Failure, Op, failure_of

__all__ = ["EnvInstance", "SlotThread"]

logger = logging.getLogger(__name__)


class SlotThread:
    """A thread, its queue, and the environments that live in it.

    Attributes:
        calls: A batch with the positions of the calls to make, an `EnvInstance` to dispose of, or
            `None` at the end.
        thread: `None` until it is needed.
        pending: Batches in the queue, the one that runs included.
        current: The batch and position of the call that runs.
        abandoned: It hangs, and ends when it comes back.
    """

    __slots__ = ("abandoned", "calls", "current", "instances", "pending", "thread")

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.instances: set[EnvInstance] = set()
        self.pending = 0
        self.current: tuple[Any, int] | None = None
        self.abandoned = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.thread is not None and self.thread.is_alive()


class EnvInstance:
    """An environment and its running episode; a failed step or reset ends the episode.

    Args:
        make_env: Makes the environment; called on first use.
        thread: Where it is made, used and closed.
        lost: Why there is no episode from the start.

    Attributes:
        in_episode: An episode can be stepped.
        lost: Why the last episode was lost; stays until a reset.
    """

    __slots__ = ("_env", "_make_env", "_return_so_far", "in_episode", "lost", "thread")

    def __init__(
        self, make_env: Callable[[], Env], thread: SlotThread, lost: Failure | None = None
    ) -> None:
        self._make_env = make_env
        self._env: Env | None = None
        self._return_so_far = 0.0
        self.in_episode = False
        self.lost = lost
        self.thread = thread
        thread.instances.add(self)

    def run(self, op: Op, slot: int, args: tuple[Any, ...]) -> object:
        """Do what was asked; whatever is raised is returned as a `Failure`.

        Returns:
            For a step the fields of its result, else what the method of the env returned.
        """
        if self.lost is not None and op != "reset":
            return self.lost
        try:
            if op == "step":
                return self._step(slot, *args)
            if op == "reset":
                return self._reset(*args)
            if op == "make":
                return self._describe()
            return _call(self._made(), op, *args[0], **args[1])
        except BaseException as error:
            failure = failure_of(error, f"slot {slot}: {op}")
            if op in ("step", "reset"):
                self.in_episode = False
                self.lost = failure
            return failure

    @property
    def is_instant(self) -> bool:
        """Whether the environment says that its steps take no time."""
        return self._env is not None and self._env.instant is True

    def dispose(self) -> None:
        """Close the environment; the next use makes a new one."""
        env, self._env = self._env, None
        if env is None:
            return
        try:
            _call(env, "close")
        except BaseException as error:
            logger.warning("closing an environment failed: %r", error)

    def _made(self) -> Env:
        if self._env is None:
            self._env = self._make_env()
        return self._env

    def _describe(self) -> dict[str, Any]:
        env = self._made()
        return {"tools": _tools_or_none(env), "scores": overrides_evaluate(env)}

    def _reset(self, trajectory: Any, want_tools: bool) -> object:
        self.in_episode = False
        if self.lost is not None:
            self.dispose()
        self.lost = None
        env = self._made()
        result = _checked(_call(env, "reset", trajectory), "reset")
        self.in_episode = True
        self._return_so_far = 0.0
        return (result, _tools_or_none(env)) if want_tools else result

    def _step(self, slot: int, tool_name: str, arguments: dict[str, Any]) -> object:
        if not self.in_episode or self._env is None:
            return Failure(text=f"slot {slot}: no episode is running; reset the slot first")
        result = _checked(self._env.step(tool_name, arguments), "step")
        info = result.info
        if "episode_reward" not in info:
            if not info.get("error"):
                self._return_so_far += result.reward
            # Into a copy: the environment may return the same result again.
            info = {**info, "episode_reward": self._return_so_far}
        return result.observation, result.reward, result.done, info


def _checked(value: Any, op: str) -> StepResult:
    """Put right what an env returned; raise where it is no result at all."""
    if type(value) is not StepResult and (
        isinstance(value, type) or not hasattr(value, "observation")
    ):
        raise TypeError(f"{op} must return a StepResult, found {value!r}")
    return as_step_result(value)


def _call(env: Env, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method, or its async twin where an env has only that one of its own."""
    cls, twin = type(env), f"a{name}"
    inherited = getattr(cls, name) is getattr(Env, name)
    if inherited and getattr(cls, twin, None) is not getattr(Env, twin, None):
        return finish(getattr(env, twin)(*args, **kwargs))
    return getattr(env, name)(*args, **kwargs)


def _tools_or_none(env: Env) -> list[Any] | None:
    try:
        return list(env.tools())
    except Exception:  # asked again, and reported, when they are needed
        return None
