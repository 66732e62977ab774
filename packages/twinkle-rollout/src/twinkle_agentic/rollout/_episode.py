"""One trajectory, from its prompt to its score, as both rollouts play it.

`Episode` knows the limits, runs the tool calls, decides when it ends, and writes the output. Where
the next message of the model comes from is the matter of a `MessageSource`: an endpoint (`_chat`)
or a sampler in this process (`_sampled`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from twinkle_agentic._aio.bounded import Deadline, must_propagate
from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.envs._log_once import log_raised
from twinkle_agentic.protocol._messages import KNOWN_FINISHES, NOT_EXECUTED, Reply
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.rollout._episode_env import EnvPlan, EpisodeEnv
from twinkle_agentic.rollout._failures import failure_of
from twinkle_agentic.rollout._tool_calls import Toolbox, run_calls
from twinkle_agentic.rollout.failures import FailurePolicy
from twinkle_agentic.rollout.types import (
    BrokenCallAnswer,
    Failure,
    FinishedTrajectory,
    Limits,
    StopReason,
)
from twinkle_agentic.tools._outcome import describe_error
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["Episode", "MessageSource", "Plan", "SourceEnded", "play"]

logger = logging.getLogger(__name__)

BROKEN_CALL = (
    "Error: your last message holds a tool call that could not be read, so nothing was executed. "
    "Write the call again in the format of the tools."
)


class SourceEnded(Exception):
    """There is no next message.

    Attributes:
        stop: Why.
        failure: What went wrong, if anything.
    """

    def __init__(self, stop: StopReason, failure: Failure | None = None) -> None:
        super().__init__(stop)
        self.stop, self.failure = stop, failure


class MessageSource(Protocol):
    """The conversation of one trajectory, and where its next message comes from.

    Attributes:
        turns: Messages of the model so far.
        paused_s: Seconds that requests were held back while the rollout was paused.
        raw_replies: Messages that had to be repaired, as they came.
    """

    turns: int
    paused_s: float
    raw_replies: list[dict[str, Any]]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation; the first observation of an env is added before `begin`."""
        ...

    @property
    def total_tokens(self) -> int | None:
        """Tokens of the prompt and the latest reply together; `None` where it is unknown."""
        ...

    def begin(self, tools: Sequence[Any] | None) -> Sequence[Any] | None:
        """Take the definitions of the tools, and return those the model is offered."""
        ...

    async def next(self, deadline: Deadline) -> tuple[Reply, bool]:
        """Return the next message, and whether it holds a call that could not be read.

        Raises:
            SourceEnded: There is none.
        """
        ...

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append answers to calls, or a user message."""
        ...

    def leave(self) -> None:
        """Note that no further message will be asked for; idempotent."""
        ...

    def fields(self) -> dict[str, Any]:
        """Return what the source adds to the output."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all trajectories of one call share.

    Attributes:
        source: Makes the message source of a trajectory.
        limits: How far a trajectory may go.
        envs: What their envs share; `None` where a tool manager is given.
        execute_final_calls: Whether calls of the last turn are executed; by default where an env
            stands behind the tools.
        on_broken_call: What follows a call that cannot be read.
        max_broken_calls: How many of them in a row are answered.
        finish_reason_required: A turn without a finish reason may be cut, and fails.
        retry: How often a trajectory is played.
        failures: Which failures are tried again.
        step_pool: Threads for tools, steps and scoring.
    """

    source: Callable[[Mapping[str, Any]], MessageSource]
    limits: Limits
    envs: EnvPlan | None
    execute_final_calls: bool | None = None
    on_broken_call: BrokenCallAnswer = "end"
    max_broken_calls: int = 3
    finish_reason_required: bool = True
    retry: RetryPolicy
    failures: FailurePolicy
    step_pool: ThreadPool


class Episode:
    """The state of one trajectory while it is rolled out; used once.

    Args:
        plan: What it shares with the others.
        trajectory: The input; not changed.
        manager: Its tool manager; `None` with an env factory.
        deadline: When it must end.
    """

    def __init__(
        self,
        plan: Plan,
        trajectory: Mapping[str, Any],
        manager: Any | None,
        deadline: Deadline,
    ) -> None:
        self._plan = plan
        self._input = trajectory
        self._env = None if plan.envs is None else EpisodeEnv(plan.envs, trajectory)
        self._toolbox = Toolbox(ToolManager() if manager is None else manager)
        self._deadline = deadline
        self._started = time.monotonic()
        self._stop: StopReason | None = None
        self._failure: Failure | None = None
        self._eval_reward: float | None = None
        self._unscored = False
        self._unparsed = 0
        self._broken_in_a_row = 0
        self._empty_reply: Failure | None = None
        self._tools: Sequence[Any] | None = None
        self._timing: dict[str, float] = {"model": 0.0, "tools": 0.0}
        self._turn_timings: list[dict[str, float]] = []
        self.source = plan.source(trajectory)

    async def run(self) -> FinishedTrajectory:
        """Roll the trajectory out; the env is closed on every path.

        Returns:
            The finished trajectory. Failures are recorded in it; only a cancellation is raised.
        """
        try:
            use_pool(self._plan.step_pool)
            if self._env is not None:
                await self._open(self._env)
            elif self._toolbox.done:
                over = "the episode of the env was over before the rollout began: reset the env"
                self._end(StopReason.ENV_ERROR, Failure(over, "env"))
            try:
                if self._stop is None:
                    await self._converse()
            finally:
                self.source.leave()
            if self._env is not None:
                await self._score(self._env)
            total = self._reward()
            if total is not None and not math.isfinite(total):
                self._stop = StopReason.ENV_ERROR
                self._failure = Failure(f"the rewards of the episode add up to {total!r}", "env")
        except BaseException as error:
            if must_propagate(error):
                raise
            # A fault of the rollout itself costs this trajectory, not the batch.
            logger.exception("a trajectory ended by an unexpected error")
            self._stop = StopReason.API_ERROR
            self._failure = Failure(describe_error(error), "internal")
        finally:
            self.source.leave()
            if self._env is not None:
                await self._env.close()
        return self._output()

    async def _open(self, env: EpisodeEnv) -> None:
        try:
            self._toolbox = await env.open(self._deadline)
        except BaseException as error:
            if must_propagate(error):
                raise
            if self._deadline.passed:
                self._end(StopReason.DEADLINE, self._too_late("the reset of the env"))
            else:
                log_raised(error, "making or resetting an env")
                self._end(StopReason.ENV_ERROR, failure_of(error, default="env"))
            return
        if (ended := env.ended_by_reset()) is not None:
            self._end(*ended)
        env.show_first(self.source.messages)

    async def _converse(self) -> None:
        tools: Any = self._input.get("tools")
        self._tools = self._toolbox.manager.tool_infos() if tools is None else tools
        self._tools = self.source.begin(self._tools or None)
        execute_last = self._plan.execute_final_calls
        if execute_last is None:
            execute_last = self._toolbox.has_env
        while self._stop is None:
            reply = await self._timed_reply()
            if reply is None:
                return
            if self._stop is not None:
                self._answer(reply, "the turn ended the trajectory")
                return
            last = self.source.turns >= self._plan.limits.max_turns
            if not reply.calls:
                await self._timed_tools(self._answer_text(reply))
            elif last and not execute_last:
                self._answer(reply, "the turn limit was reached")
            else:
                await self._timed_tools(self._execute(reply))
            self._end_after_tools()
            if last:
                self._end(StopReason.MAX_TURNS)

    async def _next_reply(self) -> Reply | None:
        """Take in the next message; `None` where there is none."""
        try:
            reply, broken = await self.source.next(self._deadline)
        except SourceEnded as ended:
            if self._deadline.passed and ended.failure and ended.failure.kind == "timeout":
                self._end(StopReason.DEADLINE, self._too_late("a reply of the model"))
            else:
                self._end(ended.stop, ended.failure)
            return None
        if reply.dropped_calls:
            self._toolbox.errors["too_many_calls"] += reply.dropped_calls
        self._unparsed += broken
        self._end_after_reply(reply)
        if self._stop is None and not reply.calls:
            self._end_after_text(reply, broken=broken)
        return reply

    def _end_after_reply(self, reply: Reply) -> None:
        """End where the turn is not known to be complete, or the context is full."""
        finish = reply.finish_reason
        if finish is None and self._plan.finish_reason_required:
            self._end(
                StopReason.API_ERROR,
                Failure(
                    "the turn has no finish_reason, so it may be cut: for a server that never "
                    "sends one set finish_reason_required=False",
                    "bad_reply",
                ),
            )
        elif finish is not None and finish not in KNOWN_FINISHES:
            gave_up = (
                f"the turn was given up or is unknown to be complete: finish_reason {finish!r}"
            )
            self._end(StopReason.API_ERROR, Failure(gave_up, "server_error", True))
        elif finish == "length":
            self._end(StopReason.LENGTH)
        elif finish == "content_filter":
            cut = "the provider's content filter cut the turn"
            self._end(StopReason.STOP, Failure(cut, "content_filter"))
        elif reply.calls:
            self._check_length()

    def _end_after_text(self, reply: Reply, *, broken: bool) -> None:
        """Decide what a message without a call means, before the env is asked."""
        if broken and self._plan.on_broken_call == "answer":
            self._broken_in_a_row += 1
            if self._broken_in_a_row <= self._plan.max_broken_calls:
                return
        else:
            self._broken_in_a_row = 0
        if broken:
            why = "the model wrote a broken call, or the server's tool-call parser does not fit"
            self._end(StopReason.STOP, Failure(why, "unparsed_tool_call"))
        elif reply.reasoning and not reply.message.get("content"):
            empty = "the reply is empty: all its text is in the reasoning"
            self._empty_reply = Failure(empty, "empty_reply")

    async def _answer_text(self, reply: Reply) -> None:
        """Go on after a message without a call, where the env or `on_broken_call` may answer."""
        if self._broken_in_a_row:
            self.source.add([{"role": "user", "content": BROKEN_CALL}])
            return
        failure, self._empty_reply = self._empty_reply, None
        limit_s = self._deadline.cap_s(self._plan.limits.tool_timeout_s)
        observation = await self._toolbox.reply(reply.message, limit_s)
        if observation is None:
            self._end(StopReason.STOP, failure)
        else:
            self.source.add([{"role": "user", "content": observation}])

    async def _execute(self, reply: Reply) -> None:
        self._broken_in_a_row = 0
        try:
            texts = await run_calls(
                self._toolbox,
                reply.calls,
                tool_timeout_s=self._plan.limits.tool_timeout_s,
                deadline=self._deadline,
            )
        except BaseException:
            self._answer(reply, "the trajectory ended by an error")
            raise
        self._add_answers(reply, texts)

    def _answer(self, reply: Reply, why: str) -> None:
        """Answer calls that are not executed, so that the conversation can be continued."""
        self._add_answers(reply, [f"{NOT_EXECUTED}: {why}."] * len(reply.calls))

    def _add_answers(self, reply: Reply, texts: Sequence[str]) -> None:
        self.source.add(
            [
                {"role": "tool", "tool_call_id": call["id"], "content": text}
                for call, text in zip(reply.calls, texts, strict=True)
            ]
        )

    def _end_after_tools(self) -> None:
        steps = self._toolbox.steps
        if self._deadline.passed:
            self._end(StopReason.DEADLINE, self._too_late("the end of a turn"))
        elif self._toolbox.done:
            if (failure := steps.lost_episode_failure) is not None:
                self._end(StopReason.ENV_ERROR, failure)
            else:
                self._end(StopReason.ENV_TRUNCATED if steps.truncated else StopReason.ENV_DONE)

    def _check_length(self) -> None:
        limit, total = self._plan.limits.max_trajectory_tokens, self.source.total_tokens
        if limit is None:
            return
        if total is None:
            unknown = "max_trajectory_tokens cannot be kept: the server's replies have no usage"
            self._end(StopReason.API_ERROR, Failure(unknown, "bad_reply"))
        elif total >= limit:
            self._end(StopReason.LENGTH)

    def _end(self, reason: StopReason, failure: Failure | None = None) -> None:
        """Note why the trajectory ended; the first reason stays."""
        if self._stop is None:
            self._stop, self._failure = reason, failure

    def _too_late(self, missed: str) -> Failure:
        limit_s = self._plan.limits.deadline_s or 0
        return Failure(f"deadline_s={limit_s:g} passed before {missed}", "timeout", True)

    async def _score(self, env: EpisodeEnv) -> None:
        if self._stop is None or self._stop.is_infrastructure or not env.scores:
            return
        if self.source.turns == 0:
            return
        if (failure := self._toolbox.steps.lost_episode_failure) is not None:
            # The step that the deadline cut may still run inside the env: it cannot be asked.
            why = self._failure or failure
            self._failure = replace(why, text=f"{why.text}; the env could not be evaluated")
            self._unscored = True
            return
        try:
            self._eval_reward = await env.score(cast("dict[str, Any]", self._output()))
        except BaseException as error:
            if must_propagate(error):
                raise
            log_raised(error, "the evaluate of an env")
            self._stop = StopReason.ENV_ERROR
            self._failure = failure_of(error, default="env")

    async def _timed_reply(self) -> Reply | None:
        turns, paused_s, started = self.source.turns, self.source.paused_s, time.monotonic()
        try:
            return await self._next_reply()
        finally:
            paused_s = self.source.paused_s - paused_s
            spent = {"model": time.monotonic() - started - paused_s}
            if paused_s:
                spent["paused"] = paused_s
            for phase, seconds in spent.items():
                self._timing[phase] = self._timing.get(phase, 0.0) + seconds
            if self.source.turns > turns:
                self._turn_timings.append({**spent, "tools": 0.0})

    async def _timed_tools(self, work: Any) -> None:
        started = time.monotonic()
        try:
            await work
        finally:
            seconds = time.monotonic() - started
            self._timing["tools"] += seconds
            self._turn_timings[-1]["tools"] += seconds

    def _reward(self) -> float | None:
        """Sum up the rewards; `None` where there is none, as `FinishedTrajectory` says."""
        if self._stop is None or self._stop.is_infrastructure or self._unscored:
            return None
        if self.source.turns == 0 or not self._toolbox.has_env:
            return None
        return sum(self._toolbox.steps.rewards) + (self._eval_reward or 0.0)

    def _output(self) -> FinishedTrajectory:
        stop, failure = self._stop or StopReason.API_ERROR, self._failure
        env, steps = self._env, self._toolbox.steps
        timing = {"reset": 0.0, **self._timing, "evaluate": 0.0, "close": 0.0}
        if env is not None:
            timing |= env.timing
        timing["total"] = time.monotonic() - self._started
        out: FinishedTrajectory = {
            "messages": cast("Any", list(self.source.messages)),
            "turns": self.source.turns,
            "stop_reason": stop.value,
            "truncated": stop.truncates,
            "reward": self._reward(),
            "step_rewards": list(steps.rewards),
            "eval_reward": self._eval_reward,
            "reward_missing_steps": list(steps.missing),
            "failed_steps": list(steps.failed),
            "error": None if failure is None else failure.text,
            "error_kind": None if failure is None else failure.kind,
            "retryable": failure is not None and failure.retryable,
            "tool_errors": dict(self._toolbox.errors),
            "unparsed_tool_calls": self._unparsed,
            "timing": timing,
            "turn_timings": [dict(turn) for turn in self._turn_timings],
            "usage": None,
        }
        if self._tools and self._input.get("tools") is None:
            out["tools"] = list(self._tools)
        if env is not None and env.close_error is not None:
            out["close_error"] = env.close_error
        return cast("FinishedTrajectory", {**self._input, **out, **self.source.fields()})


async def play(
    plan: Plan, trajectory: Mapping[str, Any], manager: Any | None
) -> tuple[FinishedTrajectory, list[dict[str, Any]]]:
    """Roll a trajectory out, again where a failure that may pass left it without a reward.

    The deadline holds for all attempts together.

    Returns:
        The finished trajectory, and those messages of the model that had to be repaired, as they
        came; both of the last attempt.
    """
    deadline = Deadline(plan.limits.deadline_s)
    errors: list[str] = []
    first = time.monotonic()
    while True:
        started = time.monotonic()
        episode = Episode(plan, trajectory, manager, deadline)
        out = await episode.run()
        attempt = len(errors) + 1
        if plan.retry.max_attempts > 1:
            out["attempts"] = attempt
            out["earlier_errors"] = list(errors)
            out["timing"] = {**out["timing"], "earlier": started - first}
        pause_s = plan.retry.pause_s(attempt)
        left_s = deadline.left_s()
        if not plan.failures.tries_again(out) or attempt >= plan.retry.max_attempts:
            break
        if left_s is not None and left_s <= pause_s:
            break
        errors.append(str(out["error"]))
        await asyncio.sleep(pause_s)
    return out, episode.source.raw_replies
