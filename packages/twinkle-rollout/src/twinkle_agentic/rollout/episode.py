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
from twinkle_agentic.protocol.fields import fields_of, items_of
from twinkle_agentic.protocol.request import Conversation
from twinkle_agentic.rollout.asking import Ask, Failure, failure_of
from twinkle_agentic.rollout.env_session import (
    add_observation,
    close_env,
    make_env,
    reset_env,
    score_env,
)
from twinkle_agentic.rollout.history import (
    NOT_EXECUTED,
    Reply,
    looks_like_call,
    read_reply,
    tool_message,
    wire_history,
)
from twinkle_agentic.rollout.tokens import TokenLog
from twinkle_agentic.rollout.tool_turn import Toolbox, run_calls
from twinkle_agentic.rollout.types import EnvFactory, Limits, ResetObservation, StopReason
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
    """

    def __init__(self, plan: Plan, trajectory: Mapping[str, Any], manager: Any | None) -> None:
        self._plan = plan
        self._input = trajectory
        self._env: Any = None
        self._toolbox = Toolbox(ToolManager() if manager is None else manager)
        self._messages: list[dict[str, Any]] = [
            dict(fields_of(message)) for message in items_of(trajectory.get("messages"))
        ]
        self._wire = Conversation([])
        self._used_ids: set[str] = set()
        self._tools: list[Any] | None = None
        self._offered: frozenset[str] = frozenset()
        self._deadline = Deadline(plan.limits.deadline_s)
        self._started = time.monotonic()
        self._turns = 0
        self._stop: StopReason | None = None
        self._failure: Failure | None = None
        self._eval_reward: float | None = None
        self._unscored = False
        self._close_error: str | None = None
        self._tokens = TokenLog(want_ids=plan.ask.wants_ids, want_logprobs=plan.ask.wants_logprobs)
        self._unparsed = 0
        self.raw_replies: list[dict[str, Any]] = []
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
        info = fields_of(getattr(result, "info", None))
        if info.get("error"):
            self._end(
                StopReason.ENV_ERROR,
                Failure(
                    str(info["error"]),
                    str(info.get("error_kind") or "env"),
                    bool(info.get("retryable")),
                ),
            )
        elif getattr(result, "done", False):
            self._end(StopReason.ENV_DONE)
        observation: Any = getattr(result, "observation", None)
        if observation and self._plan.reset_observation != "ignore":
            add_observation(self._messages, str(observation), self._plan.reset_observation)

    async def _converse(self) -> None:
        limits = self._plan.limits
        self._tools = self._input.get("tools")
        if self._tools is None:
            infos: Any = self._toolbox.manager.tool_infos()
            self._tools = infos or None
        self._offered = frozenset(
            str(fields_of(fields_of(tool).get("function")).get("name"))
            for tool in self._tools or ()
        )
        self._wire = Conversation(
            wire_history(self._messages, used_ids=self._used_ids, offered=self._offered)
        )
        if not self._wire:
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
            last = self._turns >= limits.max_turns
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
        trajectory: dict[str, Any] = {"messages": self._wire}
        if self._tools:
            trajectory["tools"] = self._tools
        ask = self._plan.ask
        try:
            completion = await ask(trajectory, self._deadline)
        except Exception as error:
            failure = failure_of(error)
            if self._deadline.passed and failure.kind == "timeout":
                self._end(StopReason.DEADLINE, self._too_late("a reply of the model"))
            elif failure.kind == "context_length":
                self._end(StopReason.LENGTH, failure)
            else:
                self._end(StopReason.API_ERROR, failure)
            return None
        self._turns += 1
        raw: object = completion.messages[0]
        finish: Any = fields_of(raw).get("finish_reason")
        reply = read_reply(
            raw,
            turn=self._turns,
            used_ids=self._used_ids,
            offered=self._offered,
            keep_calls=finish not in ("length", "content_filter"),
        )
        if reply.repaired:
            self.raw_replies.append({"turn": self._turns, "message": raw})
        self._messages.append(reply.message)
        self._wire.append(reply.wire)
        self._tokens.add(self._turns, completion)
        if reply.dropped_calls:
            self._toolbox.errors["too_many_calls"] += reply.dropped_calls
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
        text_call = bool(self._tools) and looks_like_call(reply.message.get("content"))
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
        return reply

    async def _execute(self, reply: Reply) -> None:
        texts = await run_calls(
            self._toolbox,
            reply.calls,
            tool_timeout_s=self._plan.limits.tool_timeout_s,
            deadline=self._deadline,
        )
        for call, text in zip(reply.calls, texts, strict=True):
            self._add_tool_message(call, text)

    def _answer(self, reply: Reply, why: str) -> None:
        """Answer calls that are not executed, so that the conversation can be continued."""
        for call in reply.calls:
            self._add_tool_message(call, f"{NOT_EXECUTED}: {why}.")

    def _add_tool_message(self, call: dict[str, Any], text: str) -> None:
        message = tool_message(call["id"], text)
        self._messages.append(message)
        self._wire.append(message)

    def _end_after_tools(self) -> None:
        if self._deadline.passed:
            self._end(StopReason.DEADLINE, self._too_late("the end of a turn"))
        elif self._toolbox.done:
            lost = self._toolbox.steps.error
            if lost is None:
                self._end(StopReason.ENV_DONE)
            else:
                self._end(StopReason.ENV_ERROR, Failure(*lost))

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
        if self._env is None or self._turns == 0 or self._stop is None:
            return
        if self._stop.infrastructure or not overrides_evaluate(self._env):
            return
        if (lost := self._toolbox.steps.error) is not None:
            # The step that the deadline cut may still run inside the env: it cannot be asked.
            why = self._failure or Failure(*lost)
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
        if self._stop.infrastructure or self._unscored or self._turns == 0:
            return None
        if not self._toolbox.has_env:
            return None
        return sum(self._toolbox.steps.rewards) + (self._eval_reward or 0.0)

    def _output(self) -> dict[str, Any]:
        stop = self._stop or StopReason.API_ERROR
        failure = self._failure or Failure()
        steps = self._toolbox.steps
        out = dict(self._input)
        if self._tools and out.get("tools") is None:
            out["tools"] = list(self._tools)
        out.update(
            messages=list(self._messages),
            turns=self._turns,
            stop_reason=stop.value,
            truncated=stop not in (StopReason.STOP, StopReason.ENV_DONE),
            reward=self._reward(),
            step_rewards=list(steps.rewards),
            eval_reward=self._eval_reward,
            reward_missing_steps=list(steps.missing),
            failed_steps=list(steps.failed),
            error=failure.text,
            error_kind=failure.kind,
            retryable=failure.retryable,
            tool_errors=dict(self._toolbox.errors),
            unparsed_tool_calls=self._unparsed,
            timing={**self._timing, "total": time.monotonic() - self._started},
            usage=dict(self._tokens.usage) or None,
        )
        if self._tokens.turns:
            out["token_turns"] = list(self._tokens.turns)
        if self._close_error is not None:
            out["close_error"] = self._close_error
        return out
