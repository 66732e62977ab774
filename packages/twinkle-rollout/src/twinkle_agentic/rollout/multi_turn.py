"""Multi-turn rollout with a sampler in this process: one batched call per turn."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.envs.background import run_sync
from twinkle_agentic.protocol.fields import fields_of, items_of
from twinkle_agentic.protocol.sampling import SamplingParams
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.bridge import IGNORED, BridgeError, append_ids, bridge_ids, plain
from twinkle_agentic.rollout.checks import check_trajectories, resolve_managers
from twinkle_agentic.rollout.finished import SampledTrajectory
from twinkle_agentic.rollout.history import NOT_EXECUTED, looks_like_call
from twinkle_agentic.rollout.structural import SampledSequence, Sampler, SampleResponse, Template
from twinkle_agentic.rollout.tool_turn import Toolbox, run_calls
from twinkle_agentic.rollout.trace import TraceWriter
from twinkle_agentic.rollout.types import StopReason, require_positive
from twinkle_agentic.rollout.waiting import Deadline
from twinkle_agentic.tools.threads import ThreadPool, use_pool

__all__ = ["MultiTurnRollout"]

_OVERRIDES = ("sampling_params", "tool_manager", "global_step")


class MultiTurnRollout(Rollout):
    """Drives a batch of conversations with a sampler in this process.

    Each turn is one `sampler.sample` call over the trajectories still going; the tool calls of the
    turn then run, those of different trajectories at the same time. Sampled ids and their log
    probabilities are kept as they are; tool messages and the next prompt are appended as tokens
    labelled -100. The envs behind the tools are the caller's to reset and close.

    The model is shown the `tools` of a trajectory, where it has them; a manager's definitions are
    not added to the prompt.

    What comes back is described at `SampledTrajectory`; the model input (`input_ids`, `labels`,
    ...) is among it. Tool messages that ended a trajectory are in `messages` only: they have no
    tokens.

    Args:
        sampler: See `twinkle_agentic.rollout.structural`.
        template: As well; local, not a remote handle.
        tool_manager: One for all trajectories, or a list, one per trajectory. A manager whose tools
            act on one env serves one trajectory only.
        sampling_params: Of each turn; `num_samples` must be 1.
        max_turns: Model messages per trajectory (>= 1). Calls of the last one are executed where an
            env stands behind the tools, and else answered as not executed.
        max_trajectory_tokens: Ends a trajectory (`length`) that has this many tokens, or would with
            the tool messages.
        trace_dir: Folder for one JSON file per trajectory.
        trace_callback: Says of a finished trajectory whether to write its trace.
        success_callback: Says whether it is a success, for the name of the file.
        tool_timeout_s: Limit of one tool call (a tool's own limit goes first); `None` for none.
        max_threads: Threads for blocking tools.

    Raises:
        ValueError: A limit is out of range, `num_samples` is not 1, the template is missing or
            splits what is too long.
    """

    def __init__(
        self,
        sampler: Sampler,
        template: Template,
        tool_manager: Any = None,
        sampling_params: Any = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        trace_callback: Callable[[dict[str, Any]], bool] | None = None,
        success_callback: Callable[[dict[str, Any]], bool] | None = None,
        *,
        tool_timeout_s: float | None = 600.0,
        max_threads: int = 256,
    ) -> None:
        if not hasattr(template, "tokenizer"):
            raise ValueError(
                f"template must be a local template with a tokenizer, found {template!r}"
            )
        if getattr(template, "truncation_strategy", None) == "split":
            raise ValueError(
                "the template has truncation_strategy='split', which would cut a trajectory into "
                "several: use 'left', 'right', 'delete' or 'raise'"
            )
        if isinstance(max_turns, bool) or max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, found {max_turns!r}")
        require_positive("max_trajectory_tokens", max_trajectory_tokens)
        require_positive("tool_timeout_s", tool_timeout_s)
        self.sampler = sampler
        self.template = template
        self.tool_manager = tool_manager
        self.sampling_params = _one_sample(sampling_params or SamplingParams())
        self.max_turns = max_turns
        self.max_trajectory_tokens = max_trajectory_tokens
        self.tool_timeout_s = tool_timeout_s
        self._threads = ThreadPool(max_threads)
        self._traces = (
            TraceWriter(trace_dir, trace_callback=trace_callback, success_callback=success_callback)
            if trace_dir
            else None
        )

    def __call__(
        self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[SampledTrajectory]:
        """Roll out every trajectory.

        Args:
            trajectories: Prompts; not changed.
            **kwargs: For this call only: `sampling_params`, `tool_manager`, `global_step` (for the
            names of traces).

        Returns:
            One trajectory per input, in the same order.

        Raises:
            TypeError: `trajectories` is a single one, one of them is no mapping, or an override is
                not known.
            ValueError: A manager list does not fit, or one env would serve several trajectories.
            RuntimeError: The sampler broke its contract: a response missing, sampled ids changed,
                log probabilities or labels that do not fit the ids.
            Exception: Whatever the sampler or `template.encode` raised.
        """
        unknown = sorted(set(kwargs) - set(_OVERRIDES))
        if unknown:
            raise TypeError(f"unknown overrides {unknown}: a call takes {', '.join(_OVERRIDES)}")
        given = check_trajectories(trajectories)
        override: Any = kwargs.get("tool_manager")
        managers = resolve_managers(override or self.tool_manager, len(given))
        params = _one_sample(kwargs.get("sampling_params") or self.sampling_params)
        started = time.monotonic()
        runs = [
            _Run(number, trajectory, self.template, manager)
            for number, (trajectory, manager) in enumerate(zip(given, managers, strict=True))
        ]
        timing = {"model": 0.0, "tools": 0.0}
        while live := [run for run in runs if run.stop is None]:
            before = time.monotonic()
            sequences = self._sample([run.feature for run in live], params)
            between = time.monotonic()
            calling = [
                run
                for run, sequence in zip(live, sequences, strict=True)
                if run.take(sequence, self.max_turns, self.max_trajectory_tokens)
            ]
            if calling:
                run_sync(self._run_tools(calling))
            for run in calling:
                run.go_on(self.max_turns, self.max_trajectory_tokens)
            timing["model"] += between - before
            timing["tools"] += time.monotonic() - between
        timing["total"] = time.monotonic() - started
        outs = [run.output(timing) for run in runs]
        if self._traces is not None:
            for number, out in enumerate(outs):
                path, problem = self._traces.write(
                    out, position=number, global_step=kwargs.get("global_step")
                )
                out["trace_path"] = path
                if problem is not None:
                    out["trace_error"] = problem
        return cast("list[SampledTrajectory]", outs)

    def _sample(self, features: list[dict[str, Any]], params: Any) -> list[SampledSequence]:
        mesh = getattr(self.sampler, "device_mesh", None)
        least: int = getattr(mesh, "data_world_size", 1) or 1
        batch = features + [features[-1]] * (least - len(features))  # every rank needs an input
        responses: Sequence[SampleResponse] = self.sampler.sample(batch, sampling_params=params)
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

    async def _run_tools(self, runs: Sequence[_Run]) -> None:
        use_pool(self._threads)
        await asyncio.gather(*(run.execute(self.tool_timeout_s) for run in runs))


class _Run:
    """The state of one trajectory."""

    def __init__(
        self, number: int, trajectory: Mapping[str, Any], template: Template, manager: Any
    ) -> None:
        self.number, self.trajectory, self.template = number, trajectory, template
        # Templates add to the messages they get.
        messages = [dict(fields_of(message)) for message in items_of(trajectory.get("messages"))]
        encoded = template.encode({**trajectory, "messages": messages}, add_generation_prompt=True)
        self.feature: dict[str, Any] = plain(dict(encoded))
        self.feature.setdefault("messages", messages)
        self.toolbox = Toolbox(manager)
        self.stop: StopReason | None = None
        self.failure: tuple[str, str, bool] | None = None
        self.turns = 0
        self.unparsed = 0
        self.logprobs: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.last_id: int | None = None

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
            feature = concat(before, tokens)
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
        """Run the calls of the turn."""
        texts = await run_calls(
            self.toolbox, self.calls, tool_timeout_s=tool_timeout_s, deadline=Deadline(None)
        )
        self._answer(texts)

    def go_on(self, max_turns: int, max_tokens: int | None) -> None:
        """Append the tool messages and the next prompt, or end."""
        if self.toolbox.done:
            self.failure = self.toolbox.steps.error
            self.stop = StopReason.ENV_DONE if self.failure is None else StopReason.ENV_ERROR
        elif self.turns >= max_turns:
            self.stop = StopReason.MAX_TURNS
        else:
            self._bridge(max_tokens)
        if self.stop is not None:
            self._append_messages()

    def output(self, timing: dict[str, float]) -> dict[str, Any]:
        """Return the finished trajectory; labels and log probabilities must fit each other."""
        assert self.stop is not None
        if self.logprobs:
            trained = sum(label != IGNORED for label in self.feature.get("labels") or ())
            if trained != len(self.logprobs):
                raise self._broken(
                    f"{trained} labels to learn from, but {len(self.logprobs)} log probabilities"
                )
        steps = self.toolbox.steps
        text, kind, retryable = self.failure or (None, None, False)
        rewarded = self.toolbox.has_env and not self.stop.infrastructure
        out = {**self.trajectory, **self.feature}
        out.update(
            messages=list(self.feature["messages"]),
            logprobs=self.logprobs or None,
            turns=self.turns,
            stop_reason=self.stop.value,
            truncated=self.stop not in (StopReason.STOP, StopReason.ENV_DONE),
            reward=sum(steps.rewards) if rewarded else None,
            step_rewards=list(steps.rewards),
            eval_reward=None,
            reward_missing_steps=list(steps.missing),
            failed_steps=list(steps.failed),
            error=text,
            error_kind=kind,
            retryable=retryable,
            tool_errors=dict(self.toolbox.errors),
            unparsed_tool_calls=self.unparsed,
            timing=dict(timing),
            usage=None,
        )
        return out

    def _decide(
        self, stop_reason: str | None, text: str, max_turns: int, max_tokens: int | None
    ) -> bool:
        length = len(self.feature["input_ids"])
        if stop_reason in ("abort", "error"):
            self.failure = (f"the sampler gave up the turn: {stop_reason!r}", "server_error", True)
            self._end(StopReason.API_ERROR, "the turn was given up")
        elif stop_reason == "length":
            self._end(StopReason.LENGTH, "the turn was cut at its token limit")
        elif self.calls and max_tokens is not None and length >= max_tokens:
            self._end(StopReason.LENGTH, "the trajectory reached its token limit")
        elif not self.calls:
            if self.toolbox.manager.tool_infos() and looks_like_call(text):
                self.unparsed += 1
                self.failure = (
                    "the model wrote a tool call that the template did not parse",
                    "unparsed_tool_call",
                    False,
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
        except BridgeError as error:
            self.stop = StopReason.API_ERROR
            self.failure = (str(error), "template", False)
            return
        if max_tokens is not None and len(self.feature["input_ids"]) + len(ids) >= max_tokens:
            self.stop = StopReason.LENGTH
            return
        longer = append_ids(self.template, self.feature, ids)
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
            calls = list(self.template.parse_tool_call(text) or [])
            if calls:
                message["tool_calls"] = calls
        return [dict(fields_of(call)) for call in calls]

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


def _one_sample(params: Any) -> Any:
    if getattr(params, "num_samples", 1) != 1:
        raise ValueError(
            f"a rollout takes num_samples=1, found {params.num_samples}: repeat the trajectory "
            "for a group"
        )
    return params
