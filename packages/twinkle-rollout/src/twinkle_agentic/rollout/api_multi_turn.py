"""Multi-turn rollout over a chat-completions endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout._batch import CANCELLATION_S, OnDone, play_all
from twinkle_agentic.rollout._chat import Chat, Endpoint
from twinkle_agentic.rollout._checks import (
    attempts_of,
    check_attempts,
    check_body,
    check_choice,
    check_exclusive,
    check_overrides,
    check_trajectories,
    descriptor_limit,
    one_sample,
    resolve_managers,
    tools_or_envs,
)
from twinkle_agentic.rollout._episode import Plan
from twinkle_agentic.rollout._episode_env import EnvPlan, EnvThreads
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.trace import TraceWriter
from twinkle_agentic.rollout.types import (
    BrokenCallAnswer,
    EnvFactory,
    FinishedTrajectory,
    Limits,
    ResetObservation,
)

__all__ = ["APIMultiTurnRollout"]

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
        execute_final_calls: Overrides which calls of the last turn are executed: all or none.
        on_done: Called with each finished trajectory as it ends, in the event loop: a short
            function, or a coroutine function (not for one that ends while the rollout is
            cancelled). What it raises is logged.
        retry: How trajectories are played again; `max_attempts` is the short form (with pauses of
            0.5 s, doubled each time, up to 30 s).
        reasoning: `keep` sends the reasoning of earlier turns back to the model, in the field it
            came in, until the endpoint refuses that; `drop` leaves it out.
        finish_reason_required: Whether a turn without a finish reason fails, since it may have been
            cut: by default where the API object gives one with each complete turn, as `OpenAI`
            does. A reason outside the protocol (`abort`, ...) always does.
        on_broken_call: What follows a message whose tool call cannot be read: `answer` it with an
            error, so that the model may try again, or `end` the trajectory.
        max_broken_calls: How many such messages in a row are answered.

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
        execute_final_calls: bool | None = None,
        on_done: OnDone | None = None,
        retry: RetryPolicy | None = None,
        reasoning: Literal["keep", "drop"] = "keep",
        finish_reason_required: bool | None = None,
        on_broken_call: BrokenCallAnswer = "end",
        max_broken_calls: int = 3,
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
        self.retry = attempts_of(max_attempts, retry, env_factory)
        check_choice("reset_observation", reset_observation, ResetObservation)
        check_choice("reasoning", reasoning, Literal["keep", "drop"])
        check_choice("on_broken_call", on_broken_call, BrokenCallAnswer)
        check_count("max_broken_calls", max_broken_calls, at_least=0)
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
        self.reasoning: Literal["keep", "drop"] = reasoning
        self.finish_reason_required = finish_reason_required
        self.on_broken_call: BrokenCallAnswer = on_broken_call
        self.max_broken_calls = max_broken_calls
        self.extra_body = check_body(extra_body)
        self.reset_observation: ResetObservation = reset_observation
        self.execute_final_calls = execute_final_calls
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

    @property
    def max_turns(self) -> int:
        """Model messages per trajectory."""
        return self.limits.max_turns

    @property
    def max_attempts(self) -> int:
        """How often a trajectory is played at most."""
        return self.retry.max_attempts

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
            clean_up_s=self.limits.close_timeout_s + CANCELLATION_S,
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
        check_overrides(kwargs, _OVERRIDES)
        given = check_trajectories(trajectories)
        manager, factory = tools_or_envs(self.tool_manager, self.env_factory, kwargs)
        check_attempts(self.retry.max_attempts, factory)
        managers = resolve_managers(manager, len(given)) if factory is None else None
        if not given:
            return []
        endpoint = Endpoint(
            self.api,
            one_sample(kwargs.get("sampling_params") or self.sampling_params),
            {**self.extra_body, **check_body(kwargs.get("extra_body"))},
            request_timeout_s=self.limits.request_timeout_s,
            pool=self._api_threads,
            reasoning=self.reasoning,
        )
        required = self.finish_reason_required
        plan = Plan(
            source=lambda trajectory: Chat(endpoint, trajectory),
            limits=self.limits,
            envs=None
            if factory is None
            else EnvPlan(
                factory=factory,
                limits=self.limits,
                reset_observation=self.reset_observation,
                threads=self._env_threads,
            ),
            execute_final_calls=self.execute_final_calls,
            on_broken_call=self.on_broken_call,
            max_broken_calls=self.max_broken_calls,
            finish_reason_required=endpoint.sends_finish_reason if required is None else required,
            retry=self.retry,
            step_pool=self._env_threads.step,
        )
        async with endpoint.lease():
            return await play_all(
                plan,
                given,
                managers,
                concurrency=descriptor_limit(min(self.concurrency or len(given), len(given))),
                traces=self._traces,
                global_step=kwargs.get("global_step"),
                on_done=kwargs.get("on_done") or self.on_done,
            )
