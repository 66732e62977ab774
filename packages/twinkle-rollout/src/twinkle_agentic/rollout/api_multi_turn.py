"""Multi-turn rollout over a chat-completions endpoint."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic._aio.bounded import bounded, must_propagate
from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout._gc import raised_gc_threshold
from twinkle_agentic.rollout.asking import Ask
from twinkle_agentic.rollout.attempts import play
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.checks import (
    check_attempts,
    check_body,
    check_exclusive,
    check_reset_observation,
    check_trajectories,
    descriptor_limit,
    one_sample,
    resolve_managers,
    tools_or_envs,
)
from twinkle_agentic.rollout.env_life import EnvPlan, EnvThreads
from twinkle_agentic.rollout.episode import Plan
from twinkle_agentic.rollout.finished import FinishedTrajectory
from twinkle_agentic.rollout.trace import TraceWriter
from twinkle_agentic.rollout.types import EnvFactory, Limits, ResetObservation

__all__ = ["APIMultiTurnRollout"]

logger = logging.getLogger(__name__)

_CANCELLATION_S = 10.0  # for what is under way when Ctrl-C comes, before the envs are closed
_CALLBACK_S = 120.0  # limit of writing one trace, and of one coroutine of `on_done`
_OVERRIDES = (
    "sampling_params",
    "tool_manager",
    "env_factory",
    "extra_body",
    "global_step",
    "on_done",
)


class APIMultiTurnRollout(Rollout):
    """Drives many conversations between a model, its tools and environments at once.

    Per trajectory: ask the model, run the tool calls of its message in order, append one tool
    message per call, ask again, until the model calls nothing, the environment is done, or a limit
    ends it. An asyncio engine behind a synchronous call; `arun` is the async twin. One trajectory's
    failure never touches another, and an infrastructure failure has no reward.

    Either `env_factory` makes an env for each trajectory (made, reset, scored where it overrides
    `evaluate`, closed on every path, interruption included), or `tool_manager` brings tools, whose
    envs the caller resets, scores and closes.

    What comes back is described at `FinishedTrajectory`.

    Args:
        api: `OpenAI`, or any object of the `API` interface; a blocking one runs in threads.
        tool_manager: One for all trajectories, or a list, one per trajectory. A manager whose tools
            act on one env serves one trajectory only. `ToolManager()` is a chat without tools.
        sampling_params: Of each turn; `num_samples` must be 1.
        max_turns: Model messages per trajectory (>= 1). Calls of the last one are executed where an
            env stands behind the tools (a step may earn a reward), and else answered as not
            executed.
        concurrency: Trajectories in flight at once, `None` for all. The default suits one server
            node; an environment server with fewer sessions needs less. Fewer where the open-file
            limit is low.
        extra_body: Merged into each request.
        trace_dir: Folder for one JSON file per trajectory, written when it ends.
        trace_callback: Says of a finished trajectory whether to write its trace.
        success_callback: Says whether it is a success, for the name of the file (`ok-`, `fail-`);
            by default a positive reward without an error is one, and what has neither is
            `unscored-`.
        env_factory: `trajectory -> env`, plain (run in a thread) or a coroutine function; excludes
            `tool_manager`.
        reset_observation: Where a non-empty observation of `reset` goes: `append` to the last user
            message (a message of its own where the last is none), `message` for a user message of
            its own, `ignore`. The `info` of `reset` is not kept; what an OpenEnv server leaves open
            in it (`reset_unverified`) is explained at `OpenEnvClient`.
        max_attempts: How often a trajectory is played at most: anew from its prompt, in a new env,
            where a failure that may pass (`retryable`) left it without a reward. Needs
            `env_factory`.
        deadline_s: Limit of one trajectory, from making its env to the last tool result, all its
            attempts together; `None` for none. What was earned is kept. Scoring and closing follow,
            within limits of their own.
        max_trajectory_tokens: Ends a trajectory (`length`) whose prompt and replies reach this many
            tokens by the server's count.
        request_timeout_s: Limit of one request with all its retries; by default the client's own
            (600 s).
        tool_timeout_s: Limit of one tool call (a tool's own limit goes first). After the step of an
            env the episode is lost.
        reset_timeout_s: Limit of making and resetting the env.
        evaluate_timeout_s: Limit of scoring.
        close_timeout_s: Limit of closing the env.
        max_threads: Threads for blocking tools and steps, and as many for resets and for closing;
            further calls queue.
        run_last_calls: Overrides which calls of the last turn are executed: all or none.
        on_done: Called with each finished trajectory as it ends, in the event loop: a short
            function, or a coroutine function (not for one that ends while the rollout is
            cancelled). What it raises is logged.

    Raises:
        ValueError: A limit is out of range, `num_samples` is not 1, or not exactly one of
            `tool_manager` and `env_factory`.

    Example:
        >>> rollout = APIMultiTurnRollout(api, env_factory=lambda trajectory: MyEnv())
        >>> tasks = [{"messages": [{"role": "user", "content": "Play."}]}]
        >>> rollout(tasks)[0]["reward"]
        1.0
    """

    def __init__(
        self,
        api: Any,
        tool_manager: Any = None,
        sampling_params: Any = None,
        max_turns: int = 6,
        concurrency: int | None = 512,
        extra_body: Mapping[str, Any] | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        trace_callback: Callable[[dict[str, Any]], bool] | None = None,
        success_callback: Callable[[dict[str, Any]], bool] | None = None,
        *,
        env_factory: EnvFactory | None = None,
        reset_observation: ResetObservation = "append",
        max_attempts: int = 1,
        deadline_s: float | None = None,
        max_trajectory_tokens: int | None = None,
        request_timeout_s: float | None = None,
        tool_timeout_s: float | None = 600.0,
        reset_timeout_s: float | None = 600.0,
        evaluate_timeout_s: float | None = 600.0,
        close_timeout_s: float = 30.0,
        max_threads: int = 256,
        run_last_calls: bool | None = None,
        on_done: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        if api is None or not (callable(api) or hasattr(api, "acomplete")):
            raise ValueError(f"api must be an OpenAI client or an API object, found {api!r}")
        if tool_manager is None and env_factory is None:
            raise ValueError(
                "neither tool_manager nor env_factory is given: pass one, or ToolManager() for a "
                "chat without tools"
            )
        check_exclusive(tool_manager, env_factory)
        check_count("concurrency", concurrency, allow_none=True)
        check_count("max_threads", max_threads)
        check_attempts(max_attempts, env_factory)
        check_reset_observation(reset_observation)
        self.api = api
        self.tool_manager = tool_manager
        self.env_factory = env_factory
        self.sampling_params = one_sample(sampling_params or SamplingParams())
        self.limits = Limits(
            max_turns=max_turns,
            max_trajectory_tokens=max_trajectory_tokens,
            deadline_s=deadline_s,
            request_timeout_s=request_timeout_s,
            tool_timeout_s=tool_timeout_s,
            reset_timeout_s=reset_timeout_s,
            evaluate_timeout_s=evaluate_timeout_s,
            close_timeout_s=close_timeout_s,
        )
        self.concurrency = concurrency
        self.max_attempts = max_attempts
        self.extra_body = check_body(extra_body)
        self.reset_observation: ResetObservation = reset_observation
        self.run_last_calls = run_last_calls
        self.on_done = on_done
        self.trace_dir = trace_dir
        self.trace_callback = trace_callback
        self.success_callback = success_callback
        self._traces = (
            TraceWriter(trace_dir, trace_callback=trace_callback, success_callback=success_callback)
            if trace_dir
            else None
        )
        self._env_threads = EnvThreads(max_threads)
        self._api_threads = ThreadPool(max(max_threads, concurrency or 4096))
        self._trace_threads = ThreadPool(4)

    @property
    def max_turns(self) -> int:
        """Model messages per trajectory."""
        return self.limits.max_turns

    def __call__(
        self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[FinishedTrajectory]:
        """Roll out every trajectory and wait; as `arun`.

        Works in any thread, also in one that runs an event loop (a notebook). Ctrl-C ends all
        trajectories, closes their envs, and is raised.

        Raises:
            RuntimeError: Called on the background loop of the adapters; await `arun` there.
        """
        return run_sync(
            self.arun(trajectories, **kwargs),
            clean_up_s=self.limits.close_timeout_s + _CANCELLATION_S,
        )

    async def arun(
        self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[FinishedTrajectory]:
        """Roll out every trajectory on the running event loop.

        Args:
            trajectories: Prompts, or trajectories to continue; not changed. `tools` in one
                overrides the manager's definitions. `user_data` reaches the env's `reset`.
            **kwargs: For this call only: `sampling_params`, `tool_manager`, `env_factory`,
                `extra_body` (added to the rollout's), `global_step` (for the names of traces),
                `on_done`.

        Returns:
            One trajectory per input, in the same order.

        Raises:
            TypeError: `trajectories` is a single one, one of them is no mapping, or an override is
                not known.
            ValueError: A manager list does not fit, or one env would serve several trajectories.
            asyncio.CancelledError: The caller was cancelled; all envs are closed by then.
        """
        unknown = sorted(set(kwargs) - set(_OVERRIDES))
        if unknown:
            raise TypeError(f"unknown overrides {unknown}: a call takes {', '.join(_OVERRIDES)}")
        given = check_trajectories(trajectories)
        manager, factory = tools_or_envs(self.tool_manager, self.env_factory, kwargs)
        check_attempts(self.max_attempts, factory)
        managers = resolve_managers(manager, len(given)) if factory is None else None
        if not given:
            return []
        extra_body = {**self.extra_body, **check_body(kwargs.get("extra_body"))}
        params = one_sample(kwargs.get("sampling_params") or self.sampling_params)
        plan = Plan(
            ask=Ask(
                self.api,
                params,
                extra_body,
                request_timeout_s=self.limits.request_timeout_s,
                pool=self._api_threads,
            ),
            limits=self.limits,
            envs=None
            if factory is None
            else EnvPlan(
                factory=factory,
                limits=self.limits,
                reset_observation=self.reset_observation,
                threads=self._env_threads,
            ),
            run_last_calls=self.run_last_calls,
            step_pool=self._env_threads.step,
        )
        places = asyncio.Semaphore(
            descriptor_limit(min(self.concurrency or len(given), len(given)))
        )
        on_done = kwargs.get("on_done") or self.on_done
        step: Any = kwargs.get("global_step")
        queued = time.monotonic()

        async def one(position: int) -> dict[str, Any]:
            async with places:
                waited = time.monotonic() - queued
                tools = None if managers is None else managers[position]
                out, raw_replies = await play(
                    plan, given[position], tools, max_attempts=self.max_attempts
                )
            out["timing"] = {"queued": waited, **out["timing"]}
            if self._traces is not None:
                try:
                    path, problem = await self._write_trace(
                        self._traces, out, position, step, raw_replies
                    )
                except asyncio.CancelledError:
                    out |= {"trace_path": None, "trace_error": "the rollout was cancelled"}
                    if on_done is not None:  # it has ended, and nobody else keeps it now
                        _tell_at_once(on_done, out)
                    raise
                out["trace_path"] = path
                if problem is not None:
                    out["trace_error"] = problem
            if on_done is not None:
                await _tell(on_done, out)
            return out

        async with plan.ask.lease():
            with raised_gc_threshold():
                tasks = [asyncio.create_task(one(position)) for position in range(len(given))]
                return cast("list[FinishedTrajectory]", await _all(tasks))

    async def _write_trace(
        self,
        traces: TraceWriter,
        out: dict[str, Any],
        position: int,
        step: int | None,
        raw_replies: list[dict[str, Any]],
    ) -> tuple[str | None, str | None]:
        writing = self._trace_threads.run(
            traces.write, out, position=position, global_step=step, raw_replies=raw_replies
        )
        try:
            return await bounded(writing, _CALLBACK_S)
        except TimeoutError:
            logger.warning("the trace of trajectory %d took too long", position)
            return None, f"not written within {_CALLBACK_S:g} s"


async def _all(tasks: list[asyncio.Task[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Wait for all; when cancelled, cancel all and wait until they have cleaned up."""
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
    return [task.result() for task in tasks]


def _tell_at_once(on_done: Callable[[dict[str, Any]], Any], out: dict[str, Any]) -> None:
    if inspect.iscoroutinefunction(on_done):
        return  # it would hold the cancellation
    try:
        on_done(out)
    except Exception:
        logger.exception("on_done failed")


async def _tell(on_done: Callable[[dict[str, Any]], Any], out: dict[str, Any]) -> None:
    try:
        answer = on_done(out)
        if inspect.isawaitable(answer):
            await bounded(answer, _CALLBACK_S)
    except BaseException as error:
        # Cancelled by itself it fails like any other, but not cancelled with us or by Ctrl-C.
        if must_propagate(error):
            raise
        logger.exception("on_done failed")
