"""One trajectory of `MultiTurnRollout`: what was sampled, what the tools said, and why it ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_agentic._aio.bounded import Deadline, must_propagate
from twinkle_agentic.envs.raised import log_raised
from twinkle_agentic.protocol.fields import fields_of, items_of
from twinkle_agentic.rollout.asking import failure_of
from twinkle_agentic.rollout.bridge import IGNORED, BridgeError, append_ids, bridge_ids, plain
from twinkle_agentic.rollout.env_life import EnvLife, check_return
from twinkle_agentic.rollout.finished import outcome_fields, reward_of
from twinkle_agentic.rollout.history import GIVEN_UP, NOT_EXECUTED, looks_like_call
from twinkle_agentic.rollout.structural import SampledSequence, Template
from twinkle_agentic.rollout.tool_turn import Toolbox, run_calls
from twinkle_agentic.rollout.types import Failure, StopReason
from twinkle_agentic.tools.outcome import describe_error
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["SampledRun"]

logger = logging.getLogger(__name__)


class SampledRun:
    """The state of one trajectory.

    In order: `open`, `begin`, then `take`, `execute`, `go_on` turn by turn until `stop` is set,
    `finish` and `output`; `close` at any time.

    Args:
        number: Its place in the batch.
        trajectory: The input; not changed.
        template: Encodes it, and what the tools say.
        manager: Its tool manager; `None` with an env.
        env: Its env; `None` with a tool manager.
    """

    def __init__(
        self,
        number: int,
        trajectory: Mapping[str, Any],
        template: Template,
        manager: Any | None,
        env: EnvLife | None = None,
    ) -> None:
        self.number, self.trajectory, self.template = number, trajectory, template
        self.toolbox = Toolbox(ToolManager() if manager is None else manager)
        self.stop: StopReason | None = None
        self.failure: Failure | None = None
        self.turns = 0
        self.unparsed = 0
        self.logprobs: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.last_id: int | None = None
        self.has_own_env = env is not None
        self._env = env
        self._eval_reward: float | None = None
        self._unparsable = False
        # Templates add to the messages they get.
        self._messages = [
            dict(fields_of(message)) for message in items_of(trajectory.get("messages"))
        ]
        self.feature: dict[str, Any] = {
            "input_ids": [],
            "labels": [],
            "messages": self._messages,
        }

    async def open(self) -> None:
        """Make and reset the env, if there is one of its own, and take in what it offers."""
        if self._env is None:
            return
        try:
            self.toolbox = await self._env.open(Deadline(None), queues=False)
            if (ended := self._env.ended_by_reset()) is not None:
                self.stop, self.failure = ended
            self._env.show_first(self._messages)
            if self.trajectory.get("tools") is None:
                self.trajectory = {**self.trajectory, "tools": self.toolbox.manager.tool_infos()}
        except BaseException as error:
            if must_propagate(error):
                raise
            log_raised(error, "making or resetting an env")
            self._end_by_env(failure_of(error, default="env"))

    def begin(self) -> None:
        """Encode the prompt."""
        try:
            prompt = {**self.trajectory, "messages": self._messages}
            encoded = self.template.encode(prompt, add_generation_prompt=True)
            self.feature = plain(dict(encoded))
        except Exception as error:
            self._template_failed(error)
        self.feature.setdefault("messages", self._messages)

    def take(self, sequence: SampledSequence, max_turns: int, max_tokens: int | None) -> bool:
        """Take in a sampled turn; tell whether there are calls to execute."""
        self.turns += 1
        tokens = [int(token) for token in sequence.tokens]
        before = self.feature
        feature: Any = sequence.new_input_feature
        if feature is None:
            concat = getattr(self.template, "concat_input_feature", None)
            if concat is None:
                raise self._broken(
                    "no new_input_feature, and the template has no concat_input_feature"
                )
            try:
                feature = concat(before, tokens)
            except Exception as error:
                self._template_failed(error)
                return False
        if "input_ids" not in feature:
            raise self._broken("a new_input_feature without input_ids")
        self.feature = plain(dict(feature))
        if not _continues(before["input_ids"], self.feature["input_ids"], tokens):
            raise self._broken(
                "input_ids that are not the former ones followed by the sampled ones"
            )
        if sequence.logprobs is not None:
            if len(sequence.logprobs) != len(tokens):
                raise self._broken(
                    f"{len(sequence.logprobs)} log probabilities for {len(tokens)} sampled ids"
                )
            self.logprobs.extend(plain(list(sequence.logprobs)))
        self.last_id = tokens[-1] if tokens else None
        text = sequence.decoded or ""
        message = self._assistant_message(len(before.get("messages") or ()), text)
        self.calls = self._calls_of(message, text)
        self.answers = []
        return self._decide(sequence.stop_reason, text, max_turns, max_tokens)

    async def execute(self, tool_timeout_s: float | None) -> None:
        """Run the calls of the turn; what fails beyond a call ends this trajectory alone."""
        try:
            texts = await run_calls(
                self.toolbox, self.calls, tool_timeout_s=tool_timeout_s, deadline=Deadline(None)
            )
        except BaseException as error:
            if must_propagate(error):
                raise
            logger.exception("trajectory %d ended by an unexpected error", self.number)
            self.failure = Failure(describe_error(error), "internal")
            self._end(StopReason.API_ERROR, "the trajectory ended by an error")
        else:
            self._answer(texts)

    def go_on(self, max_turns: int, max_tokens: int | None) -> None:
        """Append the tool messages and the next prompt, or end."""
        if self.stop is not None:
            return
        if self.toolbox.done:
            self.failure = self.toolbox.steps.loss
            self.stop = StopReason.ENV_DONE if self.failure is None else StopReason.ENV_ERROR
        elif self.turns >= max_turns:
            self.stop = StopReason.MAX_TURNS
        else:
            self._bridge(max_tokens)
        if self.stop is not None:
            self._append_messages()

    async def finish(self) -> None:
        """Let the env, if there is one of its own, score what it does score, and close it."""
        if self._env is None:
            return
        try:
            if self.turns and self.stop and not self.stop.infrastructure and self._env.scores:
                self._eval_reward = await self._env.score(self._outcome({}))
        except BaseException as error:
            if must_propagate(error):
                raise
            log_raised(error, "the evaluate of an env")
            self._end_by_env(failure_of(error, default="env"))
        finally:
            await self._env.close()

    async def close(self) -> None:
        """Close the env, if there is one of its own."""
        if self._env is not None:
            await self._env.close()

    def output(self, timing: Mapping[str, float]) -> dict[str, Any]:
        """Return the finished trajectory; labels and log probabilities must fit each other.

        Args:
            timing: Of the whole batch.
        """
        if self.logprobs:
            trained = sum(label != IGNORED for label in self.feature.get("labels") or ())
            if trained != len(self.logprobs):
                raise self._broken(
                    f"{trained} labels to learn from, but {len(self.logprobs)} log probabilities"
                )
        if (failure := check_return(self._reward())) is not None:
            self._end_by_env(failure)
        if self._env is None:
            return self._outcome(timing)
        out = self._outcome({**timing, **self._env.timing})
        if self._env.close_error is not None:
            out["close_error"] = self._env.close_error
        return out

    def _outcome(self, timing: Mapping[str, float]) -> dict[str, Any]:
        assert self.stop is not None
        outcome = outcome_fields(
            self.toolbox,
            messages=self.feature["messages"],
            turns=self.turns,
            stop=self.stop,
            failure=self.failure,
            reward=self._reward(),
            eval_reward=self._eval_reward,
            unparsed=self.unparsed,
            timing=timing,
            usage=None,
        )
        return {
            **self.trajectory,
            **self.feature,
            **outcome,
            "logprobs": self.logprobs or None,
        }

    def _reward(self) -> float | None:
        assert self.stop is not None
        return reward_of(
            self.toolbox, stop=self.stop, turns=self.turns, eval_reward=self._eval_reward
        )

    def _end_by_env(self, failure: Failure) -> None:
        self.stop, self.failure = StopReason.ENV_ERROR, failure

    def _decide(
        self, stop_reason: str | None, text: str, max_turns: int, max_tokens: int | None
    ) -> bool:
        length = len(self.feature["input_ids"])
        if stop_reason in GIVEN_UP:
            gave_up = f"the sampler gave up the turn: {stop_reason!r}"
            self.failure = Failure(gave_up, "server_error", True)
            self._end(StopReason.API_ERROR, "the turn was given up")
        elif stop_reason == "length":
            self._end(StopReason.LENGTH, "the turn was cut at its token limit")
        elif self.calls and max_tokens is not None and length >= max_tokens:
            self._end(StopReason.LENGTH, "the trajectory reached its token limit")
        elif not self.calls:
            if self._unparsable or (self.toolbox.manager.tool_infos() and looks_like_call(text)):
                self.unparsed += 1
                self.failure = Failure(
                    "the model wrote a tool call that the template did not parse",
                    "unparsed_tool_call",
                )
            self.stop = StopReason.STOP
        elif self.turns >= max_turns and not self.toolbox.has_env:
            self._end(StopReason.MAX_TURNS, "the turn limit was reached")
        return self.stop is None

    def _end(self, stop: StopReason, why: str) -> None:
        self.stop = stop
        self._answer([f"{NOT_EXECUTED}: {why}."] * len(self.calls))
        self._append_messages()

    def _answer(self, texts: Sequence[str]) -> None:
        for call, text in zip(self.calls, texts, strict=True):
            answer = {"role": "tool", "content": text}
            if call.get("id"):  # only some chat formats have ids
                answer["tool_call_id"] = call["id"]
            self.answers.append(answer)

    def _append_messages(self) -> None:
        self.feature["messages"] = [*self.feature["messages"], *self.answers]
        self.answers = []

    def _bridge(self, max_tokens: int | None) -> None:
        messages: list[Any] = self.feature["messages"]
        try:
            ids = bridge_ids(
                self.template,
                messages,
                self.answers,
                last_id=self.last_id,
                tools=self.trajectory.get("tools"),
            )
            longer = append_ids(self.template, self.feature, ids)
        except Exception as error:
            self._template_failed(error)
            return
        if max_tokens is not None and len(self.feature["input_ids"]) + len(ids) >= max_tokens:
            self.stop = StopReason.LENGTH
            return
        if longer is None or len(longer["input_ids"]) < len(self.feature["input_ids"]) + len(ids):
            self.stop = StopReason.LENGTH  # beyond the template's max_length; keep what was whole
            return
        self.feature = longer
        self._append_messages()

    def _assistant_message(self, former: int, text: str) -> dict[str, Any]:
        messages = items_of(self.feature.get("messages"))
        if len(messages) <= former:  # the sampler left it to us
            messages.append({"role": "assistant", "content": text})
        self.feature["messages"] = messages
        return messages[-1]

    def _calls_of(self, message: dict[str, Any], text: str) -> list[dict[str, Any]]:
        calls: list[Any] = items_of(message.get("tool_calls"))
        if not calls and message.get("role") == "assistant":
            try:
                calls = list(self.template.parse_tool_call(text) or [])
            except Exception:  # what the model wrote, not the template, is at fault
                self._unparsable = True
            if calls:
                message["tool_calls"] = calls
        return [dict(fields_of(call)) for call in calls]

    def _template_failed(self, error: Exception) -> None:
        """End this trajectory alone: a template fails on one conversation, not on all."""
        if self.stop is not None:
            return  # it has ended already, at the reset of its env
        text = str(error) if isinstance(error, BridgeError) else describe_error(error)
        self.stop = StopReason.API_ERROR
        self.failure = Failure(f"the template failed: {text}", "template")

    def _broken(self, found: str) -> RuntimeError:
        return RuntimeError(
            f"the sampler broke its contract at turn {self.turns} of trajectory {self.number}: "
            f"{found}"
        )


def _continues(before: list[int], after: list[int], tokens: list[int]) -> bool:
    """Tell whether `after` is `before` and the sampled ids, perhaps cut on the left."""
    kept = len(after) - len(tokens)
    if kept < 0 or kept > len(before):
        return False
    return after[kept:] == tokens and after[:kept] == before[len(before) - kept :]
