"""One trajectory, from its prompt to its score."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinkle_agentic.envs.base import overrides_evaluate
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.rollout.asking import Ask, failure_of
from twinkle_agentic.rollout.env_session import (
    add_observation,
    close_env,
    make_env,
    reset_env,
    score_env,
)
from twinkle_agentic.rollout.finished import outcome_fields
from twinkle_agentic.rollout.history import NOT_EXECUTED, Reply, looks_like_call
from twinkle_agentic.rollout.tokens import TokenLog
from twinkle_agentic.rollout.tool_turn import Toolbox, failure_in, run_calls
from twinkle_agentic.rollout.transcript import Transcript
from twinkle_agentic.rollout.types import (
    EnvFactory,
    Failure,
    Limits,
    ResetObservation,
    StopReason,
)
from twinkle_agentic.rollout.waiting import Deadline, bounded
from twinkle_agentic.tools.threads import ThreadPool, run_blocking, use_pool
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["Episode", "Plan"]

logger = logging.getLogger(__name__)

_PHASES = ("reset", "model", "tools", "evaluate", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all trajectories of one call share.

    Attributes:
        ask: How to reach the model.
        limits: How far a trajectory may go.
        env_factory: Makes the env of a trajectory; `None` where a tool manager is given.
        reset_observation: Where the observation of `reset` goes.
        run_last_calls: Whether calls of the last turn are executed; `None`: where an env stands
            behind the tools.
        reset_pool: Threads for making and resetting envs.
        step_pool: Threads for tools, steps and scoring.
        close_pool: Threads for closing.
        live_envs: Ids of the envs in use, to notice a factory that returns one twice.
    """

    ask: Ask
    limits: Limits
    env_factory: EnvFactory | None
    reset_observation: ResetObservation
    run_last_calls: bool | None
    reset_pool: ThreadPool
    step_pool: ThreadPool
    close_pool: ThreadPool
    live_envs: set[int] = field(default_factory=set[int])


class Episode:
    """The state of one trajectory while it is rolled out; used once.

    Args:
        plan: What it shares with the others.
        trajectory: The input; not changed.
        manager: Its tool manager; `None` with an env factory.

    Attributes:
        transcript: What was said.
    """

    def __init__(self, plan: Plan, trajectory: Mapping[str, Any], manager: Any | None) -> None:
        self._plan = plan
        self._input = trajectory
        self._env: Any = None
        self._toolbox = Toolbox(ToolManager() if manager is None else manager)
        self.transcript = Transcript(trajectory.get("messages"))
        self._deadline = Deadline(plan.limits.deadline_s)
        self._started = time.monotonic()
        self._stop: StopReason | None = None
        self._failure: Failure | None = None
        self._eval_reward: float | None = None
        self._unscored = False
        self._close_error: str | None = None
        self._tokens = TokenLog(want_ids=plan.ask.wants_ids, want_logprobs=plan.ask.wants_logprobs)
        self._unparsed = 0
        self._timing: dict[str, float] = dict.fromkeys(_PHASES, 0.0)

    async def run(self) -> dict[str, Any]:
        """Roll the trajectory out; the env is closed on every path.

        Returns:
            The finished trajectory. Failures are recorded in it; only a cancellation is raised.
        """
        try:
            try:
                if self._plan.env_factory is not None:
                    # Resets that wait for room must not take the threads of the steps that make it.
                    use_pool(self._plan.reset_pool)
                    await self._timed("reset", self._open(self._plan.env_factory))
                use_pool(self._plan.step_pool)
                if self._stop is None:
                    await self._converse()
                await self._score()
                self._check_return()
            except Exception as error:  # a fault of ours: still only this trajectory's
                logger.exception("a trajectory ended by an unexpected error")
                self._lose(error)
        finally:
            if self._env is not None:
                await self._timed("close", self._close())
        return self._output()

    def lost(self, error: BaseException) -> dict[str, Any]:
        """Return the trajectory as ended by a fault in the rollout itself."""
        self._lose(error)
        return self._output()

    def _lose(self, error: BaseException) -> None:
        self._stop = StopReason.API_ERROR
        self._failure = Failure(f"{type(error).__name__}: {error}", "internal")

    async def _open(self, factory: EnvFactory) -> None:
        limits = self._plan.limits
        own = Deadline(limits.reset_timeout_s)
        try:
            env = await make_env(factory, self._input, timeout_s=self._deadline.cap_s(own.left_s()))
            if id(env) in self._plan.live_envs:
                raise EnvError(
                    "env_factory returned an env that another trajectory is using: make one per "
                    "trajectory"
                )
            self._plan.live_envs.add(id(env))
            self._env = env
            result = await reset_env(env, self._input, timeout_s=self._deadline.cap_s(own.left_s()))
            use_pool(self._plan.step_pool)
            tools = await bounded(
                run_blocking(EnvTool.from_env, env, timeout_s=limits.tool_timeout_s),
                self._deadline.cap_s(own.left_s()),
            )
            manager = ToolManager(tools, timeout_s=limits.tool_timeout_s)
            self._toolbox = Toolbox(manager, own_limits=True)
        except Exception as error:
            if self._deadline.passed:
                self._end(StopReason.DEADLINE, self._too_late("the reset of the env"))
            else:
                self._end(StopReason.ENV_ERROR, failure_of(error, default="env"))
            return
        if (failure := failure_in(result)) is not None:
            self._end(StopReason.ENV_ERROR, failure)
        elif getattr(result, "done", False):
            self._end(StopReason.ENV_DONE)
        observation: Any = getattr(result, "observation", None)
        if observation and self._plan.reset_observation != "ignore":
            add_observation(
                self.transcript.messages, str(observation), self._plan.reset_observation
            )

    async def _converse(self) -> None:
        tools: Any = self._input.get("tools")
        self.transcript.begin(self._toolbox.manager.tool_infos() if tools is None else tools)
        if not self.transcript.request()["messages"]:
            self._end(
                StopReason.API_ERROR,
                Failure("the trajectory has no messages: nothing to ask the model", "refused"),
            )
        run_last = self._plan.run_last_calls
        if run_last is None:
            run_last = self._toolbox.has_env
        while self._stop is None:
            reply = await self._timed("model", self._next_reply())
            if reply is None:
                return
            if not reply.calls or self._stop is not None:
                self._answer(reply, "the turn ended the trajectory")
                self._end(StopReason.STOP)
                return
            last = self.transcript.turns >= self._plan.limits.max_turns
            if last and not run_last:
                self._answer(reply, "the turn limit was reached")
                self._end(StopReason.MAX_TURNS)
                return
            await self._timed("tools", self._execute(reply))
            self._end_after_tools()
            if last:
                self._end(StopReason.MAX_TURNS)

    async def _next_reply(self) -> Reply | None:
        """Ask for one message and take it in; `None` where there is none."""
        try:
            completion = await self._plan.ask(self.transcript.request(), self._deadline)
        except Exception as error:
            failure = failure_of(error)
            if self._deadline.passed and failure.kind == "timeout":
                self._end(StopReason.DEADLINE, self._too_late("a reply of the model"))
            elif failure.kind == "context_length":
                self._end(StopReason.LENGTH, failure)
            else:
                self._end(StopReason.API_ERROR, failure)
            return None
        reply = self.transcript.take(completion.messages[0])
        self._tokens.add(self.transcript.turns, completion)
        if reply.dropped_calls:
            self._toolbox.errors["too_many_calls"] += reply.dropped_calls
        self._end_after_reply(reply)
        return reply

    def _end_after_reply(self, reply: Reply) -> None:
        finish = reply.finish_reason
        if finish in ("abort", "error"):
            self._end(
                StopReason.API_ERROR,
                Failure(
                    f"the server gave up the turn: finish_reason {finish!r}", "server_error", True
                ),
            )
        elif finish == "length":
            self._end(StopReason.LENGTH)
        elif finish == "content_filter":
            self._end(
                StopReason.STOP,
                Failure("the provider's content filter cut the turn", "content_filter"),
            )
        elif reply.calls:
            self._check_length()
        text_call = self.transcript.tools and looks_like_call(reply.message.get("content"))
        if text_call or reply.unreadable_calls:
            self._unparsed += 1
            if not reply.calls and self._stop is None:
                self._end(
                    StopReason.STOP,
                    Failure(
                        "the model made a tool call that the server left as text or lost: check "
                        "its tool-call parser",
                        "unparsed_tool_call",
                    ),
                )

    async def _execute(self, reply: Reply) -> None:
        texts = await run_calls(
            self._toolbox,
            reply.calls,
            tool_timeout_s=self._plan.limits.tool_timeout_s,
            deadline=self._deadline,
        )
        self.transcript.answer(reply.calls, texts)

    def _answer(self, reply: Reply, why: str) -> None:
        """Answer calls that are not executed, so that the conversation can be continued."""
        self.transcript.answer(reply.calls, [f"{NOT_EXECUTED}: {why}."] * len(reply.calls))

    def _end_after_tools(self) -> None:
        if self._deadline.passed:
            self._end(StopReason.DEADLINE, self._too_late("the end of a turn"))
        elif self._toolbox.done:
            loss = self._toolbox.steps.loss
            self._end(StopReason.ENV_DONE if loss is None else StopReason.ENV_ERROR, loss)

    def _check_length(self) -> None:
        limit = self._plan.limits.max_trajectory_tokens
        if limit is None:
            return
        if self._tokens.latest is None:
            self._end(
                StopReason.API_ERROR,
                Failure(
                    "max_trajectory_tokens cannot be kept: the server's replies have no usage",
                    "bad_reply",
                ),
            )
        elif self._tokens.latest >= limit:
            self._end(StopReason.LENGTH)

    def _end(self, reason: StopReason, failure: Failure | None = None) -> None:
        """Note why the trajectory ended; the first reason stays."""
        if self._stop is None:
            self._stop, self._failure = reason, failure

    def _too_late(self, missed: str) -> Failure:
        limit_s = self._plan.limits.deadline_s or 0
        return Failure(f"deadline_s={limit_s:g} passed before {missed}", "timeout", True)

    async def _score(self) -> None:
        if self._env is None or self.transcript.turns == 0 or self._stop is None:
            return
        if self._stop.infrastructure or not overrides_evaluate(self._env):
            return
        if (loss := self._toolbox.steps.loss) is not None:
            # The step that the deadline cut may still run inside the env: it cannot be asked.
            why = self._failure or loss
            self._failure = replace(why, text=f"{why.text}; the env could not be evaluated")
            self._unscored = True
            return
        await self._timed("evaluate", self._evaluate())

    async def _evaluate(self) -> None:
        try:
            self._eval_reward = await score_env(
                self._env, self._output(), timeout_s=self._plan.limits.evaluate_timeout_s
            )
        except Exception as error:
            self._stop = StopReason.ENV_ERROR
            self._failure = failure_of(error, default="env")

    def _check_return(self) -> None:
        """Flag step rewards whose sum is no number any more."""
        total = self._reward()
        if total is not None and not math.isfinite(total):
            self._stop = StopReason.ENV_ERROR
            self._failure = Failure(f"the rewards of the episode add up to {total!r}", "env")

    async def _close(self) -> None:
        try:
            self._close_error = await close_env(
                self._env, self._plan.close_pool, timeout_s=self._plan.limits.close_timeout_s
            )
        finally:
            self._plan.live_envs.discard(id(self._env))

    async def _timed(self, phase: str, work: Any) -> Any:
        started = time.monotonic()
        try:
            return await work
        finally:
            self._timing[phase] += time.monotonic() - started

    def _reward(self) -> float | None:
        assert self._stop is not None
        if self._stop.infrastructure or self._unscored or self.transcript.turns == 0:
            return None
        if not self._toolbox.has_env:
            return None
        return sum(self._toolbox.steps.rewards) + (self._eval_reward or 0.0)

    def _output(self) -> dict[str, Any]:
        out = dict(self._input)
        if self.transcript.tools and out.get("tools") is None:
            out["tools"] = list(self.transcript.tools)
        out |= outcome_fields(
            self._toolbox,
            messages=self.transcript.messages,
            turns=self.transcript.turns,
            stop=self._stop or StopReason.API_ERROR,
            failure=self._failure,
            reward=self._reward(),
            eval_reward=self._eval_reward,
            unparsed=self._unparsed,
            timing={**self._timing, "total": time.monotonic() - self._started},
            usage=self._tokens.usage,
        )
        if self._tokens.turns:
            out["token_turns"] = list(self._tokens.turns)
        if self._close_error is not None:
            out["close_error"] = self._close_error
        return out
