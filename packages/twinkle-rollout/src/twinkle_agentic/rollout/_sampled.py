"""The next message from a sampler in this process: whole batches, turn by turn.

Templates and samplers are called in the caller's thread, as they may be bound to it; episodes, with
their tools and envs, run on the background loop. A turn is sampled when every conversation that
goes on waits for one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_agentic._aio.bounded import Deadline
from twinkle_agentic._aio.mailbox import mailbox_of
from twinkle_agentic.protocol._fields import fields_of, items_of
from twinkle_agentic.protocol._messages import (
    Reply,
    finish_word,
    holds_call,
    marked_calls,
    read_reply,
)
from twinkle_agentic.rollout._episode import SourceEnded
from twinkle_agentic.rollout._token_bridge import (
    IGNORED,
    BridgeError,
    append_ids,
    bridge_ids,
    plain,
)
from twinkle_agentic.rollout.sampler import SampledSequence, Sampler, SampleResponse, Template
from twinkle_agentic.rollout.types import Failure, StopReason
from twinkle_agentic.tools._outcome import describe_error

__all__ = ["SampledChat", "SamplerBatch"]

_SIGNAL_CHECK_S = 0.5


class SamplerBatch:
    """Samples one turn for all conversations that wait for one; used once.

    Args:
        sampler: One call a turn.
        sampling_params: For each call.
        size: Conversations to begin with: no turn is sampled before each of them waits or has
            left.
    """

    def __init__(self, sampler: Sampler, sampling_params: Any, *, size: int) -> None:
        self._sampler = sampler
        self._params = sampling_params
        self._expected = size  # of the first conversation of each trajectory
        self._going_on = size
        self._waiting: list[tuple[SampledChat, asyncio.Future[tuple[Reply, bool]]]] = []
        self._changed = threading.Condition()

    def join(self) -> None:
        """Take part, as a conversation that is fresh or played again."""
        with self._changed:
            if self._expected:
                self._expected -= 1
            else:
                self._going_on += 1

    def leave(self) -> None:
        """Take part no longer."""
        with self._changed:
            self._going_on -= 1
            self._changed.notify()

    async def next(self, chat: SampledChat) -> tuple[Reply, bool]:
        """Wait for the next turn of a conversation."""
        waiting: asyncio.Future[tuple[Reply, bool]] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._waiting.append((chat, waiting))
            self._changed.notify()
        return await waiting

    def serve(self, until: threading.Event) -> None:
        """Sample in the calling thread, turn by turn, until all episodes have ended.

        Raises:
            RuntimeError: The sampler broke its contract.
            Exception: Whatever the sampler raised.
        """
        while True:
            with self._changed:
                while not (until.is_set() or (self._waiting and self._all_wait())):
                    self._changed.wait(_SIGNAL_CHECK_S)
                if until.is_set():
                    return
                batch, self._waiting = self._waiting, []
            self._turn(batch)

    def _all_wait(self) -> bool:
        return len(self._waiting) >= self._going_on

    def notify(self) -> None:
        """Let `serve` look again whether all episodes have ended."""
        with self._changed:
            self._changed.notify()

    def _turn(
        self, batch: Sequence[tuple[SampledChat, asyncio.Future[tuple[Reply, bool]]]]
    ) -> None:
        ready: list[tuple[SampledChat, asyncio.Future[tuple[Reply, bool]]]] = []
        for chat, waiting in batch:
            try:
                chat.prepare()
            except SourceEnded as ended:
                _settle(waiting, ended)
            else:
                ready.append((chat, waiting))
        if not ready:
            return
        sequences = self._sample([chat.feature for chat, _ in ready])
        for (chat, waiting), sequence in zip(ready, sequences, strict=True):
            try:
                _settle(waiting, chat.take(sequence))
            except SourceEnded as ended:
                _settle(waiting, ended)

    def _sample(self, features: list[dict[str, Any]]) -> list[SampledSequence]:
        mesh = getattr(self._sampler, "device_mesh", None)
        least: int = getattr(mesh, "data_world_size", 1) or 1
        batch = features + [features[-1]] * (least - len(features))  # every rank needs an input
        responses: Sequence[SampleResponse] = self._sampler.sample(
            batch, sampling_params=self._params
        )
        if not isinstance(cast("object", responses), (list, tuple)) or len(responses) != len(batch):
            raise RuntimeError(
                f"the sampler must return a list with one response per input: {len(batch)} inputs, "
                f"found {responses!r:.200}"
            )
        sequences: list[SampledSequence] = []
        for number, response in enumerate(responses[: len(features)]):
            if not response.sequences:
                raise RuntimeError(f"response {number} of the sampler has no sequence")
            sequences.append(response.sequences[0])
        return sequences


class SampledChat:
    """The conversation of one trajectory with a sampler, as tokens: a `MessageSource`.

    `prepare` and `take` are called in the thread of the sampler, all else on the loop.

    Args:
        batch: Samples for it.
        trajectory: The input; not changed.
        template: Encodes it, and what the tools say.
        max_tokens: Where the conversation ends for its length.
        shows_tools: Whether the prompt is rendered with the tools of the env.
    """

    def __init__(
        self,
        batch: SamplerBatch,
        trajectory: Mapping[str, Any],
        template: Template,
        *,
        max_tokens: int | None,
        shows_tools: bool,
    ) -> None:
        self._shows_tools = shows_tools
        self._batch, self._trajectory, self._template = batch, trajectory, template
        self._max_tokens = max_tokens
        self.turns = 0
        self.paused_s = 0.0
        self.raw_replies: list[dict[str, Any]] = []
        # Templates add to the messages they get.
        self._prompt = [
            dict(fields_of(message)) for message in items_of(trajectory.get("messages"))
        ]
        self.feature: dict[str, Any] = {"input_ids": [], "labels": [], "messages": self._prompt}
        self._tools: Sequence[Any] | None = None
        self._added: list[dict[str, Any]] = []
        self._used_ids: set[str] = set()
        self._offered: frozenset[str] = frozenset()
        self._logprobs: list[Any] = []
        self._last_id: int | None = None
        self._encoded = self._left = self._has_tools = False
        batch.join()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation; tool messages that ended it have no tokens."""
        if not self._added:
            return self.feature["messages"]
        return [*self.feature["messages"], *self._added]

    @property
    def total_tokens(self) -> int | None:
        """Tokens of the model input."""
        return len(self.feature["input_ids"])

    def begin(self, tools: Sequence[Any] | None) -> Sequence[Any] | None:
        """Take the tools; those of a tool manager are not added to the prompt."""
        self._has_tools = bool(tools)
        own = self._trajectory.get("tools")
        self._tools = tools if self._shows_tools or own is not None else None
        self._offered = frozenset(
            str(fields_of(fields_of(tool).get("function")).get("name")) for tool in tools or ()
        )
        return self._tools

    async def next(self, deadline: Deadline) -> tuple[Reply, bool]:
        """Wait for the next turn of the batch."""
        return await self._batch.next(self)

    def add(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append answers to calls, or a user message; they get tokens with the next turn."""
        self._added.extend(messages)

    def leave(self) -> None:
        """Let the batch go on without this conversation."""
        if not self._left:
            self._left = True
            self._batch.leave()

    def fields(self) -> dict[str, Any]:
        """Return the model input."""
        feature = {key: value for key, value in self.feature.items() if key != "messages"}
        return {**feature, "logprobs": self._logprobs or None}

    def check(self) -> None:
        """Refuse labels and log probabilities that do not fit each other.

        Raises:
            RuntimeError: They do not.
        """
        if not self._logprobs:
            return
        trained = sum(label != IGNORED for label in self.feature.get("labels") or ())
        if trained != len(self._logprobs):
            raise self._broken(
                f"{trained} labels to learn from, but {len(self._logprobs)} log probabilities"
            )

    def prepare(self) -> None:
        """Encode the prompt, or append what was added since the last turn.

        Raises:
            SourceEnded: The template failed, or there is no room.
        """
        try:
            if not self._encoded:
                self._encode()
            elif self._added:
                self._append()
        except SourceEnded:
            raise
        except Exception as error:
            raise self._template_failed(error) from error

    def take(self, sequence: SampledSequence) -> tuple[Reply, bool]:
        """Take in a sampled turn.

        Raises:
            SourceEnded: The template failed.
            RuntimeError: The sampler broke its contract.
        """
        self.turns += 1
        tokens = [int(token) for token in sequence.tokens]
        before = self.feature
        feature: Any = sequence.new_input_feature
        if feature is None:
            concat = getattr(self._template, "concat_input_feature", None)
            if concat is None:
                raise self._broken(
                    "no new_input_feature, and the template has no concat_input_feature"
                )
            try:
                feature = concat(before, tokens)
            except Exception as error:
                raise self._template_failed(error) from error
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
            self._logprobs.extend(plain(list(sequence.logprobs)))
        self._last_id = tokens[-1] if tokens else None
        return self._read(sequence, len(before.get("messages") or ()))

    def _encode(self) -> None:
        prompt: dict[str, Any] = {**self._trajectory, "messages": self._prompt}
        if self._tools and prompt.get("tools") is None:
            prompt["tools"] = list(self._tools)
        encoded = self._template.encode(prompt, add_generation_prompt=True)
        self._encoded = True
        self.feature = plain(dict(encoded))
        self.feature.setdefault("messages", self._prompt)

    def _append(self) -> None:
        """Render what was added as tokens that nothing is learnt from."""
        ids = bridge_ids(
            self._template,
            self.feature["messages"],
            self._added,
            last_id=self._last_id,
            tools=self._tools,
        )
        longer = append_ids(self._template, self.feature, ids)
        length = len(self.feature["input_ids"]) + len(ids)
        if self._max_tokens is not None and length >= self._max_tokens:
            raise SourceEnded(StopReason.LENGTH)
        if longer is None or len(longer["input_ids"]) < length:
            # Beyond the template's max_length; what was whole is kept.
            raise SourceEnded(StopReason.LENGTH)
        self.feature = longer
        self.feature["messages"], self._added = self.messages, []

    def _read(self, sequence: SampledSequence, former: int) -> tuple[Reply, bool]:
        """Make a valid message of the sampled text, and of the calls the template finds in it."""
        text = sequence.decoded or ""
        messages = items_of(self.feature.get("messages"))
        if len(messages) <= former:  # the sampler left it to us
            messages.append({"role": "assistant", "content": text})
        message = dict(fields_of(messages[-1]))
        calls: list[Any] = items_of(message.get("tool_calls"))
        unparsable = False
        if not calls and message.get("role") == "assistant":
            try:
                calls = list(self._template.parse_tool_call(text) or [])
            except Exception:  # what the model wrote, not the template, is at fault
                unparsable = True
        finish = finish_word(sequence.stop_reason)
        given = {**message, "tool_calls": calls, "finish_reason": finish}
        reply = read_reply(
            given,
            turn=self.turns,
            used_ids=self._used_ids,
            offered=self._offered,
            keep_cut_calls=True,
        )
        reply.unreadable_calls = False  # the words `tool_calls` mean nothing from a sampler
        if reply.calls:
            message["tool_calls"] = [
                _as_written(call, raw)
                for call, raw in zip(reply.message["tool_calls"], calls, strict=False)
            ]
        messages[-1] = message
        self.feature["messages"] = messages
        dropped = bool(reply.calls) and marked_calls(text) > len(reply.calls) + reply.dropped_calls
        lost = unparsable or (self._has_tools and not reply.calls and holds_call(reply))
        return reply, lost or dropped

    def _template_failed(self, error: Exception) -> SourceEnded:
        text = str(error) if isinstance(error, BridgeError) else describe_error(error)
        failure = Failure(f"the template failed: {text}", "template")
        return SourceEnded(StopReason.API_ERROR, failure)

    def _broken(self, found: str) -> RuntimeError:
        return RuntimeError(f"the sampler broke its contract at turn {self.turns}: {found}")


def _as_written(call: dict[str, Any], raw: object) -> dict[str, Any]:
    """Return a valid call with arguments that are an object where the template gave one.

    Chat templates render objects; as text they would be encoded twice.
    """
    function = fields_of(fields_of(raw).get("function"))
    if not isinstance(function.get("arguments"), Mapping):
        return call
    arguments = json.loads(call["function"]["arguments"])
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _settle(
    waiting: asyncio.Future[tuple[Reply, bool]], outcome: tuple[Reply, bool] | SourceEnded
) -> None:
    """Bring the outcome of a turn to the loop of its episode."""
    mailbox_of(waiting.get_loop()).post(_set, waiting, outcome)


def _set(
    waiting: asyncio.Future[tuple[Reply, bool]], outcome: tuple[Reply, bool] | SourceEnded
) -> None:
    if waiting.done():
        return
    if isinstance(outcome, SourceEnded):
        waiting.set_exception(outcome)
    else:
        waiting.set_result(outcome)


def _continues(before: list[int], after: list[int], tokens: list[int]) -> bool:
    """Return whether `after` is `before` and the sampled ids, perhaps cut on the left."""
    kept = len(after) - len(tokens)
    if kept < 0 or kept > len(before):
        return False
    return after[kept:] == tokens and after[:kept] == before[len(before) - kept :]
