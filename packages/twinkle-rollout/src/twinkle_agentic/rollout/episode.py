"""One trajectory, from its prompt to its score."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from twinkle_agentic._aio.bounded import Deadline
from twinkle_agentic._aio.threads import ThreadPool, use_pool
from twinkle_agentic.envs.raised import log_raised
from twinkle_agentic.rollout.asking import Ask, failure_of
from twinkle_agentic.rollout.env_life import NO_TIMING, EnvLife, EnvPlan, check_return
from twinkle_agentic.rollout.finished import outcome_fields, reward_of
from twinkle_agentic.rollout.history import GIVEN_UP, NOT_EXECUTED, Reply, looks_like_call
from twinkle_agentic.rollout.tokens import TokenLog
from twinkle_agentic.rollout.tool_turn import Toolbox, run_calls
from twinkle_agentic.rollout.transcript import Transcript
from twinkle_agentic.rollout.types import Failure, Limits, StopReason
from twinkle_agentic.tools.outcome import describe_error
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["Episode", "Plan"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all trajectories of one call share.

    Attributes:
        ask: How to reach the model.
        limits: How far a trajectory may go.
        envs: What their envs share; `None` where a tool manager is given.
        run_last_calls: Whether calls of the last turn are executed; `None`: where an env stands
            behind the tools.
        step_pool: Threads for tools, steps and scoring.
    """

    ask: Ask
    limits: Limits
    envs: EnvPlan | None
    run_last_calls: bool | None
    step_pool: ThreadPool


class Episode:
    """The state of one trajectory while it is rolled out; used once.

    Args:
        plan: What it shares with the others.
        trajectory: The input; not changed.
        manager: Its tool manager; `None` with an env factory.
        deadline: When it must end.

    Attributes:
        transcript: What was said.
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
        self._env = None if plan.envs is None else EnvLife(plan.envs, trajectory)
        self._toolbox = Toolbox(ToolManager() if manager is None else manager)
        self.transcript = Transcript(trajectory.get("messages"))
        self._deadline = deadline
        self._started = time.monotonic()
        self._stop: StopReason | None = None
        self._failure: Failure | None = None
        self._eval_reward: float | None = None
        self._unscored = False
        self._tokens = TokenLog(want_ids=plan.ask.wants_ids, want_logprobs=plan.ask.wants_logprobs)
        self._unparsed = 0
        self._timing: dict[str, float] = {"model": 0.0, "tools": 0.0}

    async def run(self) -> dict[str, Any]:
        """Roll the trajectory out; the env is closed on every path.

        Returns:
            The finished trajectory. Failures are recorded in it; only a cancellation is raised.
        """
        try:
            try:
                use_pool(self._plan.step_pool)
                if self._env is not None:
                    await self._open(self._env)
                if self._stop is None:
                    await self._converse()
                if self._env is not None:
                    await self._score(self._env)
                if (failure := check_return(self._reward())) is not None:
                    self._stop, self._failure = StopReason.ENV_ERROR, failure
            except Exception as error:  # a fault of ours: still only this trajectory's
                logger.exception("a trajectory ended by an unexpected error")
                self._lose(error)
        finally:
            if self._env is not None:
                await self._env.close()
        return self._output()

    def lost(self, error: BaseException) -> dict[str, Any]:
        """Return the trajectory as ended by a fault in the rollout itself."""
        self._lose(error)
        return self._output()

    def _lose(self, error: BaseException) -> None:
        self._stop = StopReason.API_ERROR
        self._failure = Failure(describe_error(error), "internal")

    async def _open(self, env: EnvLife) -> None:
        try:
            self._toolbox = await env.open(self._deadline)
        except Exception as error:
            if self._deadline.passed:
                self._end(StopReason.DEADLINE, self._too_late("the reset of the env"))
            else:
                log_raised(error, "making or resetting an env")
                self._end(StopReason.ENV_ERROR, failure_of(error, default="env"))
            return
        if (ended := env.ended_by_reset()) is not None:
            self._end(*ended)
        env.show_first(self.transcript.messages)

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
        if finish in GIVEN_UP:
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

    async def _score(self, env: EnvLife) -> None:
        if self._stop is None or self._stop.infrastructure or not env.scores:
            return
        if self.transcript.turns == 0:
            return
        if (loss := self._toolbox.steps.loss) is not None:
            # The step that the deadline cut may still run inside the env: it cannot be asked.
            why = self._failure or loss
            self._failure = replace(why, text=f"{why.text}; the env could not be evaluated")
            self._unscored = True
            return
        try:
            self._eval_reward = await env.score(self._output())
        except Exception as error:
            log_raised(error, "the evaluate of an env")
            self._stop = StopReason.ENV_ERROR
            self._failure = failure_of(error, default="env")

    async def _timed(self, phase: str, work: Any) -> Any:
        started = time.monotonic()
        try:
            return await work
        finally:
            self._timing[phase] += time.monotonic() - started

    def _reward(self) -> float | None:
        assert self._stop is not None
        if self._unscored:
            return None
        return reward_of(
            self._toolbox,
            stop=self._stop,
            turns=self.transcript.turns,
            eval_reward=self._eval_reward,
        )

    def _output(self) -> dict[str, Any]:
        env_s = NO_TIMING if self._env is None else self._env.timing
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
            timing={
                "reset": env_s["reset"],
                **self._timing,
                "evaluate": env_s["evaluate"],
                "close": env_s["close"],
                "total": time.monotonic() - self._started,
            },
            usage=self._tokens.usage,
        )
        if self._tokens.turns:
            out["token_turns"] = list(self._tokens.turns)
        if self._env is not None and self._env.close_error is not None:
            out["close_error"] = self._env.close_error
        return out
