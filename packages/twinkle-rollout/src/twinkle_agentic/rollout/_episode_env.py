"""The env of one trajectory: made, reset, scored, closed on every path."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from twinkle_agentic._aio.bounded import (
    Deadline,
    TimeLimitError,
    bounded,
    ended,
    finish,
    finish_async,
)
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool, current_pool, run_blocking, use_pool
from twinkle_agentic.envs.base import Env, StepResult, as_step_result, overrides_evaluate
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import EnvError, EnvTimeoutError
from twinkle_agentic.protocol._fields import fields_of
from twinkle_agentic.rollout._tool_calls import Toolbox, failure_in
from twinkle_agentic.rollout.types import (
    EnvFactory,
    Failure,
    Limits,
    ResetObservation,
    StopReason,
)
from twinkle_agentic.tools._outcome import describe_error
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["EnvPlan", "EnvThreads", "EpisodeEnv"]

logger = logging.getLogger(__name__)

_LATE_CLOSE_S = 60.0  # for the close of an env that is no longer awaited
_UNDER_WAY_S = 5.0  # what is being made or reset gets to end when its caller is cancelled


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
        wait_for_slot: Time spent waiting for the slot of a pool does not count against the limits.
            False where all envs of a batch must live at once: then none becomes free meanwhile.
    """

    factory: EnvFactory
    limits: Limits
    reset_observation: ResetObservation
    threads: EnvThreads
    wait_for_slot: bool = True


class EpisodeEnv:
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
        self._under_way: Future[Any] | asyncio.Future[Any] | None = None
        self._cancelled = False
        self.close_error: str | None = None
        self.timing = {"reset": 0.0, "evaluate": 0.0, "close": 0.0}

    async def open(self, deadline: Deadline) -> Toolbox:
        """Make and reset the env and return its tools.

        Args:
            deadline: Of the trajectory; `reset_timeout_s` holds too.

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
            if self._plan.wait_for_slot:
                waited = await _wait_for_slot(self._env)
                own.postpone(waited)
                deadline.postpone(waited)
            return await self._begin(left_s)
        finally:
            use_pool(self._plan.threads.step)
            self.timing["reset"] += time.monotonic() - started

    async def _make(self, timeout_s: float | None) -> None:
        factory = self._plan.factory
        native = inspect.iscoroutinefunction(factory)
        env = await self._run(factory, self._trajectory, timeout_s, native=native)
        if inspect.isawaitable(env):
            made = env
            env = await self._run(lambda _: made, self._trajectory, timeout_s, native=True)
        if not _is_env(env):
            raise EnvError(f"env_factory must return an env, found {env!r}")
        if id(env) in self._plan.threads.live_envs:
            raise EnvError(
                "env_factory returned an env that another trajectory is using: make one per "
                "trajectory"
            )
        self._plan.threads.live_envs.add(id(env))
        self._env = env

    async def _begin(self, left_s: Callable[[], float | None]) -> Toolbox:
        env = self._env
        native = _has_native(env, "areset")
        reset = env.areset if native else env.reset
        self._first = _first(await self._run(reset, self._trajectory, left_s(), native=native))
        use_pool(self._plan.threads.step)
        step_s = self._plan.limits.tool_timeout_s
        tools = await bounded(run_blocking(EnvTool.from_env, env, timeout_s=step_s), left_s())
        return Toolbox(ToolManager(tools, timeout_s=step_s))

    async def _run(
        self,
        method: Callable[[Any], Any],
        trajectory: Mapping[str, Any],
        timeout_s: float | None,
        *,
        native: bool,
    ) -> Any:
        """Make or reset the env in limited time; `close` deals with what comes too late.

        Raises:
            EnvTimeoutError: No result within the limit.
            Exception: Whatever the method raised.
        """
        pool = current_pool()
        given = dict(trajectory)
        call: Any = asyncio.ensure_future(_await(method(given))) if native else None
        if call is None:
            call = pool.submit(method, given)
        self._under_way = call
        try:
            result = await bounded(call if native else asyncio.wrap_future(call), timeout_s)
        except (TimeLimitError, asyncio.CancelledError) as error:
            self._cancelled = isinstance(error, asyncio.CancelledError)
            if not native:
                pool.abandon(call)
            if self._cancelled:
                raise
            what = "reset" if self._env is not None else "env_factory"
            limit = f"{what} gave no result within {timeout_s or 0:g} s"
            raise EnvTimeoutError(limit) from error
        self._under_way = None
        return result

    def ended_by_reset(self) -> tuple[StopReason, Failure | None] | None:
        """Return why the episode is over already after `reset`; `None` where it has begun."""
        if (failure := failure_in(self._first)) is not None:
            return StopReason.ENV_ERROR, failure
        if self._first is None or not self._first.done:
            return None
        return (StopReason.ENV_TRUNCATED if self._first.truncated else StopReason.ENV_DONE), None

    def show_first(self, messages: list[dict[str, Any]]) -> None:
        """Put the observation of `reset` where the model sees it."""
        observation = self._first.observation if self._first else ""
        if observation and self._plan.reset_observation != "ignore":
            _add_observation(messages, observation, self._plan.reset_observation)

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
        limit_s = self._plan.limits.evaluate_timeout_s
        try:
            return _score(await bounded(_evaluate(self._env, [dict(trajectory)]), limit_s))
        except TimeLimitError as error:
            raise EnvTimeoutError(f"evaluate gave no result within {limit_s or 0:g} s") from error
        finally:
            self.timing["evaluate"] += time.monotonic() - started

    async def close(self) -> None:
        """Close the env, if there is one; idempotent. A cancellation does not cut it short."""
        env, self._env = self._env, None
        under_way, self._under_way = self._under_way, None
        if env is None and under_way is None:
            return
        started = time.monotonic()
        limits, pool = self._plan.limits, self._plan.threads.close
        wait_s = _UNDER_WAY_S if self._cancelled else 0.0
        closing = _close_when_there(env, under_way, wait_s)
        try:
            self.close_error = await _shielded(closing, pool, limits.close_timeout_s, wait_s)
        finally:
            self._plan.threads.live_envs.discard(id(env))
            self.timing["close"] += time.monotonic() - started
        if self.close_error is not None:
            logger.warning("env %s: %s", type(env).__name__, self.close_error)


async def _wait_for_slot(env: Any) -> float:
    """Wait for the slot of a leased env, which has a limit of its own; return how long (s)."""
    if not isinstance(env, Env):
        return 0.0
    started = time.monotonic()
    await env.aacquire()
    return time.monotonic() - started


def _first(result: Any) -> StepResult | None:
    if result is None:
        return None
    if isinstance(result, type) or not hasattr(result, "observation"):
        # Otherwise the model would miss the first observation, or no episode would have begun.
        raise EnvError(f"reset failed: {as_step_result(result).error}")
    # The reward of `reset` is not counted, so that it may be anything.
    info = {
        k: v for k, v in fields_of(getattr(result, "info", None)).items() if k != "episode_reward"
    }
    return as_step_result(StepResult(result.observation, 0.0, getattr(result, "done", False), info))


async def _evaluate(env: Any, trajectories: list[dict[str, Any]]) -> Any:
    try:
        if hasattr(env, "aevaluate"):
            return await env.aevaluate(trajectories)
        return await run_blocking(env.evaluate, trajectories)
    except TimeoutError as error:  # its own, not the limit of the wait
        raise EnvTimeoutError(f"evaluate raised {describe_error(error)}") from error


def _score(scores: Any) -> float:
    """Return the one finite number that `evaluate` must give.

    Raises:
        EnvError: Something else came back.
    """
    given_scores: Any = scores.tolist() if hasattr(scores, "tolist") else scores
    if not isinstance(given_scores, (list, tuple)) or len(cast("list[Any]", given_scores)) != 1:
        raise EnvError(f"evaluate must return one number per trajectory, found {scores!r}")
    # The rule for step rewards holds here too: text is no number, NaN is none either.
    checked = StepResult.scored("", cast("list[Any]", given_scores)[0])
    if checked.error or checked.info.get("reward_missing"):
        raise EnvError(f"evaluate must return finite numbers, found {scores!r}")
    return checked.reward


def _add_observation(
    messages: list[dict[str, Any]], observation: str, where: ResetObservation
) -> None:
    """Show the first observation to the model."""
    last = messages[-1] if messages else None
    if where == "message" or last is None or last.get("role") != "user":
        messages.append({"role": "user", "content": observation})
        return
    content: Any = last.get("content")
    if isinstance(content, list):
        last["content"] = [*cast("list[Any]", content), {"type": "text", "text": observation}]
    else:
        last["content"] = f"{content}\n\n{observation}" if content else observation


async def _shielded(
    closing: Coroutine[Any, Any, None], pool: ThreadPool, timeout_s: float, wait_s: float
) -> str | None:
    """Run the closing of an env to its end, though the caller is cancelled meanwhile.

    Args:
        closing: It.
        pool: For a blocking `close`, so that it never queues behind steps.
        timeout_s: When to give up.
        wait_s: What it may take longer, for what was under way.

    Returns:
        `None`, or why the env may still be open.
    """
    context = contextvars.copy_context()
    context.run(use_pool, pool)
    work = bounded(closing, timeout_s + wait_s)
    task = asyncio.get_running_loop().create_task(work, context=context)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True  # raised after the env is closed; the wait has its own limit
    try:
        task.result()
        problem = None
    except TimeLimitError:
        problem = f"close did not return within {timeout_s:g} s"
    except Exception as error:
        problem = f"close raised {describe_error(error)}"
    if cancelled:
        raise asyncio.CancelledError
    return problem


async def _close_when_there(env: Any, under_way: Any, wait_s: float) -> None:
    """Close an env; what a call that is under way still brings is closed when it comes.

    Args:
        env: `None` where it is still being made.
        under_way: The call that makes or resets it, given up; `None` where none is.
        wait_s: How long to wait for that first, since the program may end afterwards.
    """
    if under_way is not None:
        if wait_s and isinstance(under_way, Future):
            await ended(cast("Future[Any]", under_way), wait_s)
        env = _close_after(under_way, env)
    if env is not None:
        await _close(env)


def _close_after(under_way: Any, env: Any) -> Any:
    """Return the env to close now, and have it closed (again) when a call ends later."""

    def arrived(call: Any) -> None:
        made = None if call.cancelled() or call.exception() is not None else call.result()
        late = made if env is None else env
        if _is_env(late):
            _close_late(late)

    if not under_way.done():
        under_way.add_done_callback(arrived)
        return env
    if env is None and not under_way.cancelled() and under_way.exception() is None:
        env = under_way.result()
    return env if _is_env(env) else None


async def _close(env: Any) -> None:
    if hasattr(env, "aclose"):
        await env.aclose()
    elif hasattr(env, "close"):
        await finish_async(current_pool().run(env.close))


def _has_native(env: Any, name: str) -> bool:
    """Return whether an env has a coroutine of its own, not that of `Env`."""
    method: Any = getattr(cast("type[Any]", type(env)), name, None)
    if method is None:
        return False
    return inspect.unwrap(method) is not inspect.unwrap(getattr(Env, name))


async def _await(work: Any) -> Any:
    return await work


def _is_env(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "step", None))


def _close_late(env: Any) -> None:
    def close() -> None:
        try:
            if _has_native(env, "aclose") and not _has_native(env, "close"):
                run_sync(bounded(env.aclose(), _LATE_CLOSE_S))
            elif hasattr(env, "close"):
                finish(env.close())
        except Exception:
            logger.warning("an env that came too late could not be closed", exc_info=True)

    # In a thread of its own: this may be the event loop, which a blocking close must not hold.
    _late_closers.submit(close)


_late_closers = ThreadPool(max_threads=32)
