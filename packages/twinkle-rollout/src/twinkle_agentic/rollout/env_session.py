"""The life of one env inside a rollout: made, reset, scored, closed on every path."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

from twinkle_agentic._aio.bounded import bounded, ended, finish, finish_async
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool, current_pool, use_pool
from twinkle_agentic.envs.base import Env, StepResult, as_step_result
from twinkle_agentic.envs.errors import EnvError, EnvTimeoutError
from twinkle_agentic.protocol.fields import fields_of
from twinkle_agentic.rollout.types import EnvFactory, ResetObservation
from twinkle_agentic.tools.outcome import describe_error

__all__ = [
    "add_observation",
    "close_env",
    "make_env",
    "reset_env",
    "score_env",
]

logger = logging.getLogger(__name__)

_LATE_CLOSE_S = 60.0  # for the close of an env that nobody waits for any more
_UNDER_WAY_S = 5.0  # what is being made or reset gets to end when its caller is cancelled


async def make_env(
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


async def reset_env(
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
        # Unseen it would be an episode that nobody began, or whose beginning the model misses.
        raise EnvError(f"reset failed: {as_step_result(result).error}")
    # The reward of `reset` is not counted, so that it may be anything.
    info = {
        k: v for k, v in fields_of(getattr(result, "info", None)).items() if k != "episode_reward"
    }
    return as_step_result(StepResult(result.observation, 0.0, getattr(result, "done", False), info))


async def score_env(env: Any, trajectory: Mapping[str, Any], *, timeout_s: float | None) -> float:
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


def add_observation(
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


async def close_env(env: Any, pool: ThreadPool, *, timeout_s: float) -> str | None:
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
            cancelled = True  # told on after the env is closed; the wait has its own limit
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
    """Tell whether an env has a coroutine of its own, not the one that runs the blocking method."""
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
    """Hand over a result that nobody waits for any more, once it comes."""
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
