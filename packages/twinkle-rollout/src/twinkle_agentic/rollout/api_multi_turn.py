"""Multi-turn rollout over a chat-completions endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool, run_blocking
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout._batch import CANCELLATION_S, Batch, OnDone, collect
from twinkle_agentic.rollout._chat import Chat, Endpoint
from twinkle_agentic.rollout._checks import (
    attempts_of,
    check_attempts,
    check_body,
    check_choice,
    check_exclusive,
    check_failures,
    check_overrides,
    check_trajectories,
    descriptor_limit,
    one_sample,
    resolve_managers,
    tools_or_envs,
)
from twinkle_agentic.rollout._episode import Plan
from twinkle_agentic.rollout._episode_env import EnvPlan, EnvThreads
from twinkle_agentic.rollout._gc import raised_gc_threshold
from twinkle_agentic.rollout._pause import OnPause, RequestPause
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.failures import FailurePolicy, RolloutResult
from twinkle_agentic.rollout.stream import AsyncTrajectoryStream, Feed, TrajectoryStream
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
    "group_size",
    "global_step",
    "on_done",
)


_STREAM_CONCURRENCY = 512  # of a stream where the rollout has no limit


class APIMultiTurnRollout(Rollout):
    """Drives many conversations between a model, its tools and environments at once.

    Per trajectory: ask the model, run the tool calls of its message in order, append one tool
    message per call, ask again, until the model calls nothing, the environment is done, or a limit
    ends it. An asyncio engine behind a synchronous call; `arun` is the async twin. One trajectory's
    failure never touches another, and an infrastructure failure has no reward.

    Either `env_factory` makes an env for each trajectory (made, reset, scored where it overrides
    `evaluate`, closed on every path, interruption included), or `tool_manager` brings tools, whose
    envs the caller resets, scores and closes.

    What comes back is described at `FinishedTrajectory`. `stream` and `astream` hand trajectories
    out as they end; `pause` and `resume` hold the requests back while weights are updated.

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
        group_size: How often each input is played, for methods that compare samples of one prompt:
            the output has `group_id` and `sample`. The envs of a group get the same `seed` in
            `user_data`, a random one where the input has none.
        failure_policy: What becomes of trajectories that fail; by default they are kept, without a
            reward.

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
        group_size: int = 1,
        failure_policy: FailurePolicy | None = None,
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
        self.group_size = group_size
        self.failure_policy = failure_policy or FailurePolicy()
        check_failures(self.failure_policy, self.retry.max_attempts, group_size)
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
        self._pause = RequestPause()
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
                `extra_body` (added to the rollout's), `group_size`, `global_step` (for the names of
                traces), `on_done`.

        Returns:
            A list in the order of the inputs: one trajectory for each, or `group_size`, less the
            groups that `failure_policy` leaves out. Its `coverage` says how many were asked for,
            completed and scored; where that differs, a warning is logged.

        Raises:
            TypeError: `trajectories` is a single one, one of them is no mapping, or an override is
                not known.
            ValueError: A manager list does not fit, or one env would serve several trajectories.
            RolloutFailedError: A trajectory failed for which `failure_policy` says `fail`.
            asyncio.CancelledError: The caller was cancelled; all envs are closed by then.
        """
        given = check_trajectories(trajectories)
        batch, manager = self._batch(kwargs, inputs=len(given))
        managers = None
        if manager is not None:
            managers = resolve_managers(manager, len(given), group_size=batch.group_size)
        if not given:
            return RolloutResult([], batch.coverage)
        return await collect(batch, given, managers)

    def stream(
        self,
        trajectories: Iterable[Mapping[str, Any]] = (),
        *,
        buffer: int | None = None,
        hold_open: bool = False,
        **kwargs: Any,
    ) -> TrajectoryStream:
        """Hand out trajectories as they end, while the others are played in the background.

        Args:
            trajectories: Prompts; any iterable, read as there is room.
            buffer: How many trajectories may have ended without being taken before no further one
                starts; by default `concurrency`.
            hold_open: The stream goes on after the last of `trajectories`: for `submit`, until
                `finish`.
            **kwargs: As for a call.

        Raises:
            TypeError: An override is not known.
            ValueError: One env would serve several trajectories, or there is a list of managers.
        """
        feed = self._feed(trajectories, buffer, hold_open, kwargs)
        return TrajectoryStream(feed, close_timeout_s=self.limits.close_timeout_s)

    def astream(
        self,
        trajectories: Iterable[Mapping[str, Any]] = (),
        *,
        buffer: int | None = None,
        hold_open: bool = False,
        **kwargs: Any,
    ) -> AsyncTrajectoryStream:
        """Hand out trajectories as they end, on the running event loop; arguments as `stream`."""
        return AsyncTrajectoryStream(self._feed(trajectories, buffer, hold_open, kwargs))

    def pause(
        self,
        on_pause: OnPause = "finish",
        *,
        timeout_s: float = 600.0,
        max_pause_s: float = 3600.0,
    ) -> int:
        """Stop the requests of all calls and streams of this rollout, for an update of the weights.

        When it returns, none runs and none starts until `resume`. Tools and envs go on. The time of
        the pause does not count against `deadline_s`.

        Args:
            on_pause: What becomes of requests that run: `finish`, or `abort` (they are sent again
                after the pause; a blocking API object cannot be interrupted, and its reply is
                dropped).
            timeout_s: Requests that have not finished by then are aborted.
            max_pause_s: Trajectories that wait longer than this end with a `timeout`.

        Returns:
            How many requests were aborted.

        Raises:
            RuntimeError: Called on the event loop of the rollout: await `apause` there.
            TimeoutError: Aborted requests did not end within `timeout_s` either.
            ValueError: An argument is out of range.
        """
        check_choice("on_pause", on_pause, OnPause)
        return self._pause.pause(on_pause, timeout_s, max_pause_s)

    async def apause(
        self,
        on_pause: OnPause = "finish",
        *,
        timeout_s: float = 600.0,
        max_pause_s: float = 3600.0,
    ) -> int:
        """Stop the requests without blocking the event loop; as `pause`."""
        check_choice("on_pause", on_pause, OnPause)
        return await run_blocking(self._pause.pause, on_pause, timeout_s, max_pause_s)

    def resume(self, policy_version: Any = None) -> None:
        """Let requests start again.

        Args:
            policy_version: What they are sampled with from now on, any JSON value, for
                `policy_versions` of the output; `None` leaves it as it is.
        """
        if policy_version is not None:
            self.policy_version = policy_version
        self._pause.resume()

    @property
    def policy_version(self) -> Any:
        """What the model behind the endpoint is now; set it, or let `resume` set it."""
        return self._pause.policy_version

    @policy_version.setter
    def policy_version(self, version: Any) -> None:
        self._pause.policy_version = version

    def _feed(
        self,
        trajectories: Iterable[Mapping[str, Any]],
        buffer: int | None,
        hold_open: bool,
        overrides: Mapping[str, Any],
    ) -> Feed:
        if isinstance(cast("object", trajectories), (Mapping, str, bytes)):
            check_trajectories(trajectories)  # which refuses it
        check_count("buffer", buffer, allow_none=True)
        batch, manager = self._batch(overrides, buffer=buffer)
        if manager is not None:
            if isinstance(manager, (list, tuple)):
                raise ValueError("a stream takes one tool_manager, or env_factory, and no list")
            resolve_managers(manager, 2)  # whether several trajectories can share it
        return Feed(batch, manager, trajectories, hold_open=hold_open)

    def _batch(
        self,
        overrides: Mapping[str, Any],
        *,
        inputs: int | None = None,
        buffer: int | None = None,
    ) -> tuple[Batch, Any]:
        """Make the batch of a call or a stream; returns the tool manager too, if there is one.

        Args:
            overrides: Of the call.
            inputs: How many there are; `None` for a stream.
            buffer: Of a stream.
        """
        check_overrides(overrides, _OVERRIDES)
        manager, factory = tools_or_envs(self.tool_manager, self.env_factory, overrides)
        check_attempts(self.retry.max_attempts, factory)
        group_size = overrides.get("group_size", self.group_size)
        check_failures(self.failure_policy, self.retry.max_attempts, group_size)
        concurrency = self.concurrency or _STREAM_CONCURRENCY
        max_ready = buffer or concurrency
        if inputs is not None:
            max_ready = inputs * group_size
            concurrency = min(self.concurrency or max_ready, max_ready)
        endpoint = Endpoint(
            self.api,
            one_sample(overrides.get("sampling_params") or self.sampling_params),
            {**self.extra_body, **check_body(overrides.get("extra_body"))},
            request_timeout_s=self.limits.request_timeout_s,
            pool=self._api_threads,
            pause=self._pause,
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
            failures=self.failure_policy,
            step_pool=self._env_threads.step,
        )
        batch = Batch(
            plan,
            group_size=group_size,
            concurrency=descriptor_limit(concurrency),
            max_ready=max_ready,
            resources=(endpoint.lease(), raised_gc_threshold()),
            traces=self._traces,
            global_step=overrides.get("global_step"),
            on_done=overrides.get("on_done") or self.on_done,
        )
        return batch, manager
