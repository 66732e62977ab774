"""The env of one trajectory: made, reset, scored, closed on every path."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from twinkle_agentic._aio.bounded import Deadline, bounded, ended, finish, finish_async
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
        env = await _make_env(
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
        self._first = await _reset_env(env, self._trajectory, timeout_s=left_s())
        use_pool(self._plan.threads.step)
        step_s = self._plan.limits.tool_timeout_s
        tools = await bounded(run_blocking(EnvTool.from_env, env, timeout_s=step_s), left_s())
        return Toolbox(ToolManager(tools, timeout_s=step_s))

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
        try:
            timeout_s = self._plan.limits.evaluate_timeout_s
            return await _score_env(self._env, trajectory, timeout_s=timeout_s)
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
            self.close_error = await _close_env(env, self._plan.threads.close, timeout_s=timeout_s)
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


async def _make_env(
    factory: EnvFactory,
    trajectory: Mapping[str, Any],
    *,
    timeout_s: float | None,
    keep: Callable[[Any], None],
) -> Any:
    """Make the env of one trajectory.

    One that arrives after the time limit is closed at once. When cancelled, the caller waits 5 s
    for one that is under way, since the program may end with it.

    Args:
        factory: Plain, then run in a thread, or a coroutine function.
        trajectory: For the factory.
        timeout_s: When to give up.
        keep: Takes an env that arrived although the caller is cancelled, to be closed by it.

    Raises:
        EnvTimeoutError: None within the limit.
        EnvError: The factory returned something that cannot be stepped.
        Exception: Whatever the factory raised.
    """
    given = dict(trajectory)
    if inspect.iscoroutinefunction(factory):
        made: Any = await _within(
            factory(given), timeout_s, "env_factory", late=_close_late, keep=keep
        )
    else:
        made = await _blocking(
            factory, given, timeout_s=timeout_s, what="env_factory", late=_close_late, keep=keep
        )
        if inspect.isawaitable(made):
            made = await _within(made, timeout_s, "env_factory", late=_close_late, keep=keep)
    if isinstance(made, type) or not callable(getattr(made, "step", None)):
        raise EnvError(f"env_factory must return an env, found {made!r}")
    return made


async def _reset_env(
    env: Any, trajectory: Mapping[str, Any], *, timeout_s: float | None
) -> StepResult | None:
    """Reset the env and return the first result, put right like that of a step.

    After a cancellation a blocking reset that is under way is waited for, for 5 s.

    Raises:
        EnvTimeoutError: No result within the limit. A blocking `reset` that returns later is
            followed by a `close`.
        EnvError: What it returned is neither a result nor `None`, a coroutine for instance.
        Exception: Whatever `reset` raised.
    """
    given = dict(trajectory)

    def close_again(_: Any) -> None:
        _close_late(env)

    if _has_native(env, "areset"):
        return _first(await _within(env.areset(given), timeout_s, "reset", late=close_again))
    future = current_pool().submit(env.reset, given)
    try:
        return _first(await _finished(future, timeout_s=timeout_s, what="reset"))
    except (EnvTimeoutError, asyncio.CancelledError) as error:
        # It may yet open what the close that follows here cannot see.
        if isinstance(error, asyncio.CancelledError):
            await ended(future, _UNDER_WAY_S)
        if not future.done():
            _when_late(future, close_again)
        raise


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


async def _score_env(env: Any, trajectory: Mapping[str, Any], *, timeout_s: float | None) -> float:
    """Let the env score its finished trajectory.

    Raises:
        EnvTimeoutError: No score within the limit.
        EnvError: Not exactly one finite number came back.
        Exception: Whatever `evaluate` raised.
    """
    given = [dict(trajectory)]
    if hasattr(env, "aevaluate"):
        scores = await _within(env.aevaluate(given), timeout_s, "evaluate")
    else:
        scores = await _blocking(env.evaluate, given, timeout_s=timeout_s, what="evaluate")
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


async def _close_env(env: Any, pool: ThreadPool, *, timeout_s: float) -> str | None:
    """Close the env; a cancellation of the caller meanwhile does not cut it short.

    Args:
        env: The env.
        pool: For a blocking `close`, so that it never queues behind steps.
        timeout_s: When to give up.

    Returns:
        `None`, or why the env may still be open.
    """
    context = contextvars.copy_context()
    context.run(use_pool, pool)
    task = asyncio.get_running_loop().create_task(bounded(_close(env), timeout_s), context=context)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True  # raised after the env is closed; the wait has its own limit
    try:
        task.result()
        problem = None
    except TimeoutError:
        problem = f"close did not return within {timeout_s:g} s"
    except Exception as error:
        problem = f"close raised {describe_error(error)}"
    if problem is not None:
        logger.warning("env %s: %s", type(env).__name__, problem)
    if cancelled:
        raise asyncio.CancelledError
    return problem


async def _close(env: Any) -> None:
    try:
        if hasattr(env, "aclose"):
            await env.aclose()
        elif hasattr(env, "close"):
            await finish_async(current_pool().run(env.close))
    except TimeoutError as error:  # its own, not the limit of the wait
        raise EnvError(f"TimeoutError: {error}") from error


def _has_native(env: Any, name: str) -> bool:
    """Return whether an env has a coroutine of its own, not that of `Env`."""
    method: Any = getattr(cast("type[Any]", type(env)), name, None)
    if method is None:
        return False
    return inspect.unwrap(method) is not inspect.unwrap(getattr(Env, name))


async def _within(
    work: Any,
    timeout_s: float | None,
    what: str,
    *,
    late: Callable[[Any], None] | None = None,
    keep: Callable[[Any], None] | None = None,
) -> Any:
    task = asyncio.ensure_future(work)
    try:
        return await bounded(task, timeout_s)
    except TimeoutError as error:
        if task.done() and not task.cancelled() and task.exception() is error:
            raise  # its own
        _when_late(task, late)
        raise EnvTimeoutError(f"{what} gave no result within {timeout_s or 0:g} s") from error
    except asyncio.CancelledError:
        _when_late(task, (keep or late) if task.done() else late)
        raise


async def _blocking(
    function: Callable[..., Any],
    argument: Any,
    *,
    timeout_s: float | None,
    what: str,
    late: Callable[[Any], None] | None = None,
    keep: Callable[[Any], None] | None = None,
) -> Any:
    future = current_pool().submit(function, argument)
    try:
        return await _finished(future, timeout_s=timeout_s, what=what)
    except (EnvTimeoutError, asyncio.CancelledError) as error:
        if keep is not None and isinstance(error, asyncio.CancelledError):
            await ended(future, _UNDER_WAY_S)
            late = keep if future.done() else late
        _when_late(future, late)
        raise


async def _finished(future: Future[Any], *, timeout_s: float | None, what: str) -> Any:
    """Await a call in the current pool; give it up at the limit or when cancelled."""
    try:
        return await bounded(asyncio.wrap_future(future), timeout_s)
    except TimeoutError as error:
        if future.done() and not future.cancelled():
            raise  # its own
        current_pool().abandon(future)
        raise EnvTimeoutError(f"{what} gave no result within {timeout_s or 0:g} s") from error
    except asyncio.CancelledError:
        current_pool().abandon(future)
        raise


def _when_late(
    future: Future[Any] | asyncio.Future[Any], late: Callable[[Any], None] | None
) -> None:
    """Hand over a result that is no longer awaited, once it comes."""
    if late is None:
        return
    hand_over = late

    def arrived(done: Any) -> None:
        if not done.cancelled() and done.exception() is None:
            hand_over(done.result())

    if future.done():
        arrived(future)  # a future of asyncio would tell in the loop's next round
    else:
        cast("Any", future).add_done_callback(arrived)


def _close_late(env: Any) -> None:
    def close() -> None:
        try:
            if _has_native(env, "aclose") and not _has_native(env, "close"):
                run_sync(bounded(env.aclose(), _LATE_CLOSE_S))
            elif hasattr(env, "close"):
                finish(env.close())
        except Exception:
            logger.warning("an env that came too late could not be closed", exc_info=True)

    if callable(getattr(env, "step", None)):
        # In a thread of its own: this may be the event loop, which a blocking close must not hold.
        _late_closers.submit(close)


_late_closers = ThreadPool(max_threads=32)
