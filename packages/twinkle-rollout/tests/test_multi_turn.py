"""The in-process rollout, with a real tokenizer and chat template and a scripted sampler."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jinja2
import pytest
import tokenizers

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import CapacityError, EnvError, SandboxLostError
from twinkle_agentic.protocol import SamplingParams
from twinkle_agentic.rollout import (
    APIMultiTurnRollout,
    FailurePolicy,
    MultiTurnRollout,
    RolloutFailedError,
)
from twinkle_agentic.rollout._token_bridge import (
    BridgeError,
    append_ids,
    bridge_ids,
    extend_with_bridge,
)
from twinkle_agentic.tools import FunctionTool, ToolManager

# The form of Qwen's templates: turns end with a token and a line break, tool messages share one
# user turn.
CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- else -%}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}{% set call = {"type": "function", "function": c.function} -%}
<tool_call>{{ call | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


class Tokenizer:
    """The few methods of a `transformers` tokenizer, over a byte-level BPE trained here."""

    eos_token = "<|im_end|>"

    def __init__(self, template: str = CHATML) -> None:
        self.bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        self.bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.bpe.train_from_iterator(
            ["hello world", "the tool call is here", "assistant user"], trainer
        )
        self.eos_token_id: int = self.bpe.token_to_id(self.eos_token) or 0
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        filters: Any = environment.filters
        filters["tojson"] = json.dumps
        self.template = environment.from_string(template)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False
        return self.template.render(messages=conversation, **kwargs)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.bpe.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.bpe.decode(ids, skip_special_tokens=skip_special_tokens)


class Template:
    """A template with the contract of twinkle's: labels shifted by one, refreshed after each
    change."""

    truncation_strategy = "delete"

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            trajectory["messages"],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=trajectory.get("tools"),
        )
        ids = self.tokenizer.encode(text)
        feature = {
            "input_ids": ids,
            "labels": [-100] * len(ids),
            "messages": trajectory["messages"],
        }
        return self._invoke_post_pipeline([feature])[0]

    def _invoke_post_pipeline(self, features: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (feature,) = features
        length = len(feature["input_ids"])
        if self.max_length is not None and length > self.max_length:
            return []
        labels = list(feature["labels"])
        return [
            {
                **feature,
                "labels": labels[1:] + labels[:1],
                "attention_mask": [1] * length,
                "length": length,
            }
        ]

    def concat_input_feature(self, feature: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        longer = copy.deepcopy(feature)
        labels = longer["labels"]
        longer["input_ids"] += tokens
        longer["labels"] = labels[-1:] + labels[:-1] + tokens
        longer = self._invoke_post_pipeline([longer])[0]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        calls = self.parse_tool_call(text)
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = text.split("<tool_call>")[0] if calls else text
        if calls:
            message["tool_calls"] = calls
        longer["messages"].append(message)
        return longer

    def parse_tool_call(self, decoded: str) -> list[Any]:
        found = re.findall(r"<tool_call>(.*?)</tool_call>", decoded, re.DOTALL)
        return [json.loads(text) for text in found]


def always(value: Any) -> Any:
    """Make a function that gives a value whatever it is asked."""

    def same(*_: Any, **__: Any) -> Any:
        return value

    return same


def rollout_of(*args: Any, **kwargs: Any) -> Any:
    return MultiTurnRollout(*args, **kwargs)


def call_text(text: str, name: str = "echo") -> str:
    call = {"type": "function", "function": {"name": name, "arguments": {"text": text}}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


@dataclass
class Sequence:
    tokens: list[int]
    stop_reason: str = "stop"
    logprobs: list[float] | None = None
    decoded: str | None = None
    new_input_feature: Any = None


@dataclass
class Sampler:
    """Answers turn N of each conversation with what `script(first message, N)` says."""

    template: Template
    script: Callable[[str, int], Any]
    logprobs: bool = True
    batches: list[int] = field(default_factory=list[int])
    change: Callable[[Sequence], None] = lambda sequence: None

    def sample(self, inputs: list[Any], sampling_params: Any = None) -> list[Any]:
        self.batches.append(len(inputs))
        self.params = sampling_params
        responses: list[Any] = []
        for feature in inputs:
            messages = feature["messages"]
            turn = 1 + sum(m["role"] == "assistant" for m in messages)
            said = self.script(messages[0]["content"], turn)
            sequence = said if isinstance(said, Sequence) else Sequence(self.ids(said))
            sequence.decoded = self.template.tokenizer.decode(
                sequence.tokens, skip_special_tokens=True
            )
            sequence.new_input_feature = self.template.concat_input_feature(
                feature, sequence.tokens
            )
            if self.logprobs:
                sequence.logprobs = [-0.5] * len(sequence.tokens)
            self.change(sequence)
            responses.append(SimpleNamespace(sequences=[sequence]))
        return responses

    def ids(self, text: str, end: bool = True) -> list[int]:
        return self.template.tokenizer.encode(text + ("<|im_end|>" if end else ""))


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(Tokenizer())


def prompts(*texts: str) -> Any:
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def two_turns(prompt: str, turn: int) -> Any:
    return call_text(f"{prompt} {turn}") if turn < 3 else f"done {prompt}"


def trained(out: Any) -> list[int]:
    """The ids that are learnt from, in order."""
    labels = out["labels"][-1:] + out["labels"][:-1]
    assert len(labels) == len(out["input_ids"])
    assert all(
        label in (-100, token) for label, token in zip(labels, out["input_ids"], strict=True)
    )
    return [label for label in labels if label != -100]


def test_the_tokens_are_the_canonical_conversation(template: Template, echo: ToolManager) -> None:
    (out,) = rollout_of(Sampler(template, two_turns), template, echo)(prompts("a"))
    rendered = template.tokenizer.apply_chat_template(
        out["messages"], tokenize=False, add_generation_prompt=False
    )
    # All of it, the line breaks between turns included; only the one after the last turn is not
    # there yet.
    assert template.tokenizer.decode(out["input_ids"]) + "\n" == rendered
    assert (out["stop_reason"], out["turns"], out["truncated"]) == ("stop", 3, False)


def test_only_sampled_ids_are_learnt_and_each_has_a_logprob(
    template: Template, echo: ToolManager
) -> None:
    sampler = Sampler(template, two_turns)
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    said = [*sampler.ids(call_text("a 1")), *sampler.ids(call_text("a 2")), *sampler.ids("done a")]
    assert trained(out) == said
    assert out["logprobs"] == [-0.5] * len(said)


def test_sampled_ids_are_never_tokenised_again(template: Template, echo: ToolManager) -> None:
    tokenizer = template.tokenizer
    # The same text as the canonical ids, cut into single characters.
    odd = [i for c in call_text("x") for i in tokenizer.encode(c)] + [tokenizer.eos_token_id]
    assert odd != tokenizer.encode(call_text("x") + "<|im_end|>")
    sampler = Sampler(template, lambda p, turn: Sequence(list(odd)) if turn == 1 else "end")
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert trained(out)[: len(odd)] == odd


def test_a_turn_without_its_end_token_gets_one_that_is_not_learnt(
    template: Template, echo: ToolManager
) -> None:
    sampler = Sampler(template, two_turns)
    open_end = sampler.ids(call_text("x"), end=False)
    sampler.script = lambda p, turn: Sequence(list(open_end)) if turn == 1 else "end"
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    text = template.tokenizer.decode(out["input_ids"])
    assert "</tool_call><|im_end|>\n<|im_start|>user" in text
    assert trained(out) == [*open_end, *sampler.ids("end")]


def test_tools_of_the_prompt_stay_in_the_rendering(template: Template, echo: ToolManager) -> None:
    given: Any = [{**prompts("a")[0], "tools": echo.tool_infos()}]
    (out,) = rollout_of(Sampler(template, two_turns), template, echo)(given)
    rendered = template.tokenizer.apply_chat_template(
        out["messages"], tokenize=False, add_generation_prompt=False, tools=echo.tool_infos()
    )
    assert template.tokenizer.decode(out["input_ids"]) + "\n" == rendered


def test_finished_trajectories_leave_the_batch(template: Template, echo: ToolManager) -> None:
    def script(prompt: str, turn: int) -> str:
        return call_text("x") if turn < int(prompt) else "end"

    sampler = Sampler(template, script)
    given = prompts("1", "3", "2")
    before = copy.deepcopy(given)
    outs: Any = rollout_of(sampler, template, echo)(given)
    assert sampler.batches == [3, 2, 1]
    assert [o["turns"] for o in outs] == [1, 3, 2]
    assert [o["messages"][0] for o in outs] == [t["messages"][0] for t in given]
    assert given == before


def test_every_rank_gets_an_input(template: Template, echo: ToolManager) -> None:
    sampler: Any = Sampler(template, lambda p, turn: call_text("x") if turn < int(p) else "end")
    sampler.device_mesh = SimpleNamespace(data_world_size=2)
    outs: Any = rollout_of(sampler, template, echo)(prompts("1", "3"))
    assert sampler.batches == [2, 2, 2]
    assert [o["turns"] for o in outs] == [1, 3]


def test_a_cut_turn_runs_nothing(template: Template, echo: ToolManager) -> None:
    sampler = Sampler(template, two_turns)
    cut = Sequence(sampler.ids(call_text("x"), end=False), "length")
    sampler.script = lambda p, turn: cut
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("length", True, 1)
    assert out["messages"][-1]["content"].startswith("Error: not executed")
    assert trained(out) == cut.tokens


def test_an_aborted_turn_is_an_api_error(template: Template, echo: ToolManager) -> None:
    sampler = Sampler(template, lambda p, turn: Sequence([5], "abort"))
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert (out["stop_reason"], out["retryable"], out["reward"]) == ("api_error", True, None)


def test_the_turn_limit_answers_what_is_open(template: Template, echo: ToolManager) -> None:
    rollout = rollout_of(Sampler(template, two_turns), template, echo, max_turns=2)
    (out,) = rollout(prompts("a"))
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("max_turns", True, 2)
    assert [m["role"] for m in out["messages"]] == ["user", *["assistant", "tool"] * 2]
    assert out["messages"][-1]["content"] == "Error: not executed: the turn limit was reached."


def test_the_token_limit_ends_a_trajectory(template: Template, echo: ToolManager) -> None:
    rollout = rollout_of(Sampler(template, two_turns), template, echo, max_trajectory_tokens=30)
    (out,) = rollout(prompts("a"))
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("length", True, 1)


def test_tool_messages_that_do_not_fit_end_the_trajectory(
    template: Template, echo: ToolManager
) -> None:
    sampler = Sampler(template, two_turns)
    first = len(template.encode(prompts("a")[0], True)["input_ids"]) + len(
        sampler.ids(call_text("a 1"))
    )
    rollout = rollout_of(sampler, template, echo, max_trajectory_tokens=first + 3)
    (out,) = rollout(prompts("a"))
    assert (out["stop_reason"], len(out["input_ids"])) == ("length", first)
    assert out["messages"][-1]["content"] == "echo a 1"


def test_the_templates_own_length_limit_is_length(echo: ToolManager) -> None:
    whole = Template(Tokenizer())
    sampler = Sampler(whole, two_turns)
    first = len(whole.encode(prompts("a")[0], True)["input_ids"]) + len(
        sampler.ids(call_text("a 1"))
    )
    short = Template(whole.tokenizer, max_length=first + 3)
    (out,) = rollout_of(Sampler(short, two_turns), short, echo)(prompts("a"))
    assert (out["stop_reason"], len(out["input_ids"]), out["turns"]) == ("length", first, 1)
    assert len(trained(out)) == len(out["logprobs"])


def test_no_logprobs_is_none(template: Template, echo: ToolManager) -> None:
    sampler = Sampler(template, two_turns, logprobs=False)
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert out["logprobs"] is None


def drop_logprob(sequence: Sequence) -> None:
    assert sequence.logprobs
    sequence.logprobs.pop()


def relabel(sequence: Sequence) -> None:
    sequence.new_input_feature["labels"][-3] = -100


def retokenise(sequence: Sequence) -> None:
    sequence.new_input_feature["input_ids"][-1] += 1


def lose_ids(sequence: Sequence) -> None:
    del sequence.new_input_feature["input_ids"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (drop_logprob, "log probabilities for"),
        (relabel, "labels to learn from, but"),
        (retokenise, "followed by the sampled ones"),
        (lose_ids, "without input_ids"),
    ],
)
def test_a_sampler_that_breaks_its_contract_is_refused(
    template: Template, echo: ToolManager, change: Any, match: str
) -> None:
    sampler = Sampler(template, lambda p, turn: "end of it", change=change)
    with pytest.raises(RuntimeError, match=match):
        rollout_of(sampler, template, echo)(prompts("a"))


@pytest.mark.parametrize("responses", [[], None, [SimpleNamespace(sequences=[])]])
def test_missing_responses_are_refused(
    template: Template, echo: ToolManager, responses: Any
) -> None:
    sampler: Any = SimpleNamespace(sample=always(responses))
    with pytest.raises(RuntimeError, match=r"response"):
        rollout_of(sampler, template, echo)(prompts("a"))


def test_a_sampler_may_leave_the_appending_to_the_template(
    template: Template, echo: ToolManager
) -> None:
    def forget(sequence: Sequence) -> None:
        sequence.new_input_feature = None

    sampler = Sampler(template, two_turns, change=forget)
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert (out["stop_reason"], len(trained(out))) == ("stop", len(out["logprobs"]))


def test_a_template_that_rewrites_history_ends_its_trajectory(echo: ToolManager) -> None:
    rewriting = Template(Tokenizer("{{ messages | length }}" + CHATML))
    (out,) = rollout_of(Sampler(rewriting, two_turns), rewriting, echo)(prompts("a"))
    assert (out["stop_reason"], out["error_kind"], out["reward"]) == ("api_error", "template", None)
    assert "rewrites earlier turns" in out["error"]


def test_a_call_the_template_cannot_parse_costs_no_other_trajectory(
    template: Template, echo: ToolManager
) -> None:
    def reply(prompt: str, turn: int) -> str:
        return "<tool_call>{broken</tool_call>" if prompt == "bad" else "done"

    bad, good = rollout_of(Sampler(Forgiving(template.tokenizer), reply), template, echo)(
        prompts("bad", "good")
    )
    assert (good["stop_reason"], good["error"]) == ("stop", None)
    assert (bad["stop_reason"], bad["error_kind"]) == ("stop", "unparsed_tool_call")
    assert bad["unparsed_tool_calls"] == 1


class Forgiving(Template):
    """A sampler's template that leaves the parsing to the rollout's."""

    def parse_tool_call(self, decoded: str) -> list[Any]:
        return []


class Picky(Template):
    """Fails on one prompt."""

    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> dict[str, Any]:
        if trajectory["messages"][0]["content"] == "bad":
            raise KeyError("image")
        return super().encode(trajectory, add_generation_prompt)


def test_a_prompt_the_template_cannot_encode_costs_no_other_trajectory(echo: ToolManager) -> None:
    picky = Picky(Tokenizer(CHATML))
    bad, good = rollout_of(Sampler(picky, two_turns), picky, echo)(prompts("bad", "good"))
    assert (good["stop_reason"], good["error"]) == ("stop", None)
    assert (bad["stop_reason"], bad["error_kind"], bad["reward"]) == ("api_error", "template", None)
    assert "KeyError: 'image'" in bad["error"]


def test_an_untold_template_extension_is_a_bridge_error() -> None:
    silent = Template(Tokenizer("x"))
    with pytest.raises(BridgeError, match="renders nothing"):
        bridge_ids(silent, [], [{"role": "tool", "content": "x"}], last_id=None)


def test_a_template_without_a_pipeline_still_gets_masks_and_shifted_labels() -> None:
    bare: Any = SimpleNamespace(tokenizer=Tokenizer())
    longer = append_ids(bare, {"input_ids": [1, 2], "labels": [2, -100]}, [8, 9])
    assert longer == {
        "input_ids": [1, 2, 8, 9],
        "labels": [2, -100, -100, -100],
        "attention_mask": [1, 1, 1, 1],
        "position_ids": [0, 1, 2, 3],
        "length": 4,
    }


def test_labels_of_another_length_are_refused(template: Template) -> None:
    with pytest.raises(BridgeError, match="2 input_ids, but 1 labels"):
        append_ids(template, {"input_ids": [1, 2], "labels": [2]}, [8])


def test_tools_of_different_trajectories_run_at_the_same_time(template: Template) -> None:
    together = threading.Barrier(6, timeout=20)

    def echo(text: str) -> str:
        together.wait()
        return text

    manager = ToolManager([FunctionTool(echo)])
    sampler = Sampler(template, lambda p, turn: call_text(p) if turn == 1 else "end")
    outs: Any = rollout_of(sampler, template, manager)(prompts(*"abcdef"))
    assert [o["messages"][2]["content"] for o in outs] == list("abcdef")


def test_failing_tools_are_counted_and_answered(template: Template) -> None:
    def echo(text: str) -> str:
        raise ValueError(text)

    manager = ToolManager([FunctionTool(echo)])
    (out,) = rollout_of(Sampler(template, two_turns), template, manager)(prompts("a"))
    assert (out["stop_reason"], out["tool_errors"]) == ("stop", {"tool": 2})


class Game(Env):
    def __init__(self, length: int, lost: bool = False) -> None:
        self.length, self.lost, self.steps = length, lost, 0

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.steps += 1
        if self.lost:
            return StepResult.failed("gone", kind="sandbox_lost", retryable=True)
        return StepResult(f"after {self.steps}", 1.0, self.steps >= self.length)


def act(prompt: str, turn: int) -> str:
    return call_text("go", "env_action") * 2


def test_the_env_ends_the_episode_and_gives_the_reward(template: Template) -> None:
    envs = [Game(3), Game(1), Game(99)]
    managers = [ToolManager(EnvTool.from_env(env)) for env in envs]
    rollout = rollout_of(Sampler(template, act), template, managers, max_turns=2)
    outs: Any = rollout(prompts("a", "b", "c"))
    assert [o["stop_reason"] for o in outs] == ["env_done", "env_done", "max_turns"]
    assert [o["reward"] for o in outs] == [3.0, 1.0, 4.0]
    assert [env.steps for env in envs] == [3, 1, 4]
    assert outs[1]["messages"][-1]["content"] == "Error: not executed: the episode is over."


def test_a_lost_env_has_no_reward(template: Template) -> None:
    manager = ToolManager(EnvTool.from_env(Game(3, lost=True)))
    (out,) = rollout_of(Sampler(template, act), template, manager)(prompts("a"))
    assert (out["stop_reason"], out["error_kind"], out["reward"]) == (
        "env_error",
        "sandbox_lost",
        None,
    )


def test_one_env_for_several_trajectories_is_refused(template: Template) -> None:
    manager = ToolManager(EnvTool.from_env(Game(3)))
    with pytest.raises(ValueError, match="same env"):
        rollout_of(Sampler(template, act), template, manager)(prompts("a", "b"))


def test_sampling_params_reach_the_sampler(template: Template, echo: ToolManager) -> None:
    sampler = Sampler(template, two_turns)
    rollout = rollout_of(sampler, template, echo, sampling_params=SamplingParams(seed=1))
    rollout(prompts("a"))
    assert sampler.params.seed == 1
    rollout(prompts("a"), sampling_params=SamplingParams(seed=2))
    assert sampler.params.seed == 2


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_turns": 0},
        {"max_trajectory_tokens": 0},
        {"tool_timeout_s": 0},
        {"sampling_params": SamplingParams(num_samples=2)},
        {"template": None},
        {"template": SimpleNamespace(tokenizer=None, truncation_strategy="split")},
    ],
)
def test_settings_that_cannot_work_are_refused(template: Template, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        rollout_of(
            **{"sampler": None, "template": template, "tool_manager": ToolManager(), **kwargs}
        )


def test_overrides_are_checked(template: Template, echo: ToolManager) -> None:
    rollout = rollout_of(Sampler(template, two_turns), template)
    with pytest.raises(ValueError, match="tool_manager is missing"):
        rollout(prompts("a"))
    assert len(rollout(prompts("a"), tool_manager=echo)) == 1
    with pytest.raises(TypeError, match="temperature"):
        rollout(prompts("a"), temperature=1)
    with pytest.raises(TypeError, match="wrap a single one"):
        rollout(prompts("a")[0], tool_manager=echo)


def test_an_unparsed_call_is_flagged(template: Template, echo: ToolManager) -> None:
    sampler = Sampler(template, lambda p, turn: "<tool_call>{broken")
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert (out["stop_reason"], out["error_kind"]) == ("stop", "unparsed_tool_call")


def test_traces_leave_the_tokens_out(template: Template, echo: ToolManager, tmp_path: Path) -> None:
    rollout = rollout_of(Sampler(template, two_turns), template, echo, trace_dir=tmp_path)
    outs: Any = rollout(prompts("a", "b"), global_step=4)
    record = json.loads(Path(outs[0]["trace_path"]).read_text())
    assert record["trajectory"]["messages"] == outs[0]["messages"]
    assert "input_ids" not in record["trajectory"]


def test_a_subclass_adds_to_the_trace(
    template: Template, echo: ToolManager, tmp_path: Path
) -> None:
    class Annotated(MultiTurnRollout):
        def _build_trace_record(self, traj: Any, *, idx: int, success: Any) -> dict[str, Any]:
            record = super()._build_trace_record(traj, idx=idx, success=success)
            return {**record, "place": idx}

    sampler: Any = Sampler(template, two_turns)
    rollout: Any = Annotated(sampler, template, echo, trace_dir=tmp_path)
    outs = rollout(prompts("a", "b"))
    assert json.loads(Path(outs[1]["trace_path"]).read_text())["place"] == 1


def test_extending_an_input_by_hand_gives_the_same_tokens(
    template: Template, echo: ToolManager
) -> None:
    sampler = Sampler(template, two_turns)
    feature = template.encode(prompts("a")[0], add_generation_prompt=True)
    for answer in ("echo a 1", "echo a 2"):
        (response,) = sampler.sample([feature])
        said = response.sequences[0].new_input_feature
        feature = extend_with_bridge(said, [{"role": "tool", "content": answer}], template)
        assert feature is not None
    (response,) = sampler.sample([feature])
    (out,) = rollout_of(sampler, template, echo)(prompts("a"))
    assert response.sequences[0].new_input_feature["input_ids"] == out["input_ids"]


def test_extending_an_input_beyond_the_templates_limit_gives_none() -> None:
    short = Template(Tokenizer(), max_length=5)
    feature = {
        "input_ids": [1, 2],
        "labels": [1, -100],
        "messages": [{"role": "user", "content": "a"}],
    }
    assert extend_with_bridge(feature, [{"role": "tool", "content": "long" * 9}], short) is None


def test_the_output_continues_over_an_endpoint(
    template: Template, echo: ToolManager, api: Any
) -> None:
    rollout = rollout_of(Sampler(template, two_turns), template, echo, max_turns=1)
    outs = rollout(prompts("a"))
    (out,) = APIMultiTurnRollout(api("answer"), echo)(outs)  # the endpoint refuses invalid history
    assert out["stop_reason"] == "stop"


class Arena(Env):
    """Done after `length` steps of 0.5 each; notes what is done to it."""

    def __init__(self, length: int = 2, **behaviour: Any) -> None:
        self.length, self.behaviour, self.steps = length, behaviour, 0
        self.log: list[str] = []

    def _do(self, what: str) -> Any:
        self.log.append(what)
        done = self.behaviour.get(what)
        if isinstance(done, BaseException):
            raise done
        return done() if callable(done) else done

    def reset(self, trajectory: Any = None) -> StepResult:
        self.trajectory = trajectory
        return self._do("reset") or StepResult("the board is empty")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.steps += 1
        result = self._do("step")
        return result or StepResult(f"after {self.steps}", 0.5, self.steps >= self.length)

    def tools(self) -> list[Any]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [{"type": "function", "function": {"name": "play", "parameters": parameters}}]

    def close(self) -> None:
        self._do("close")


class ScoredArena(Arena):
    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        self.scored = trajectories
        return [self._do("evaluate") or 10.0]


def play(prompt: str, turn: int) -> str:
    return call_text("x", "play")


def play_in(template: Template, *envs: Any, script: Any = play, **kwargs: Any) -> Any:
    """Roll out one trajectory for each env, in order."""

    def factory(trajectory: Any) -> Any:
        env = envs[trajectory["user_data"]["number"]]
        if isinstance(env, BaseException):
            raise env
        return env

    given: Any = [
        {"messages": [{"role": "user", "content": f"{n}"}], "user_data": {"number": n}}
        for n in range(len(envs))
    ]
    sampler = Sampler(template, script)
    return rollout_of(sampler, template, env_factory=factory, **kwargs)(given)


def test_each_trajectory_has_an_env_that_is_reset_scored_and_closed(template: Template) -> None:
    envs = [Arena(1), ScoredArena(2), Arena(9)]
    outs = play_in(template, *envs, max_turns=3)
    assert [o["stop_reason"] for o in outs] == ["env_done", "env_done", "max_turns"]
    assert [o["reward"] for o in outs] == [0.5, 11.0, 1.5]
    assert [o["step_rewards"] for o in outs] == [[0.5], [0.5] * 2, [0.5] * 3]
    assert [o["eval_reward"] for o in outs] == [None, 10.0, None]
    assert envs[0].log == ["reset", "step", "close"]
    assert envs[1].log == ["reset", "step", "step", "evaluate", "close"]
    assert envs[2].log == ["reset", "step", "step", "step", "close"]
    assert [env.trajectory["user_data"]["number"] for env in envs] == [0, 1, 2]


def test_the_env_scores_the_finished_trajectory(template: Template) -> None:
    env = ScoredArena(1)
    (out,) = play_in(template, env)
    (scored,) = env.scored
    assert (scored["messages"], scored["stop_reason"]) == (out["messages"], "env_done")
    assert scored["user_data"] == {"number": 0}


def test_the_model_sees_the_first_observation_and_the_tools_of_the_env(template: Template) -> None:
    (out,) = play_in(template, Arena(2))
    assert out["messages"][0]["content"] == "0\n\nthe board is empty"
    assert [tool["function"]["name"] for tool in out["tools"]] == ["play"]
    rendered = template.tokenizer.apply_chat_template(
        out["messages"][:-1], tokenize=False, add_generation_prompt=False, tools=out["tools"]
    )
    assert '"name": "play"' in rendered
    assert template.tokenizer.decode(out["input_ids"]) + "\n" == rendered


@pytest.mark.parametrize(
    ("where", "contents"), [("message", ["0", "the board is empty"]), ("ignore", ["0"])]
)
def test_the_first_observation_goes_where_it_is_told(
    template: Template, where: Any, contents: list[str]
) -> None:
    (out,) = play_in(template, Arena(1), reset_observation=where)
    assert [m["content"] for m in out["messages"] if m["role"] == "user"] == contents


def test_tools_of_the_trajectory_are_shown_in_place_of_the_envs(template: Template) -> None:
    own = [{"type": "function", "function": {"name": "other"}}]
    rollout = rollout_of(Sampler(template, play), template, env_factory=always(Arena(1)))
    (out,) = rollout([{**prompts("a")[0], "tools": own}])
    assert out["tools"] == own


@pytest.mark.parametrize(
    ("env", "kind", "retryable"),
    [
        (CapacityError("full"), "capacity", True),
        (None, "env", False),
        (ScoredArena(reset=SandboxLostError("gone")), "sandbox_lost", True),
        (ScoredArena(reset=StepResult.failed("no", kind="capacity")), "capacity", False),
        (ScoredArena(step=SandboxLostError("gone")), "sandbox_lost", True),
        (ScoredArena(step=EnvError("bug")), "env", False),
        (ScoredArena(evaluate=RuntimeError("judge down")), "env", False),
        (ScoredArena(evaluate=lambda: float("nan")), "env", False),
        (Arena(9, step=lambda: StepResult("", 1e308)), "env", False),
    ],
)
def test_an_infrastructure_failure_has_no_reward_and_costs_one_trajectory(
    template: Template, env: Any, kind: str, retryable: bool
) -> None:
    good = ScoredArena(2)
    bad, well = play_in(template, env, good)
    assert (bad["stop_reason"], bad["reward"], bad["truncated"]) == ("env_error", None, True)
    assert (bad["error_kind"], bad["retryable"]) == (kind, retryable)
    assert bad["error"]
    assert (well["stop_reason"], well["reward"]) == ("env_done", 11.0)
    if isinstance(env, Arena):
        assert env.log.count("close") == 1
        assert env.log[-1] == "close"


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Ambiguous:
    """Has no truth, like an array of several."""

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize(
    "behaviour",
    [
        {"reset": lambda: StepResult("over", 0.0, cast("Any", Ambiguous()))},
        {"reset": lambda: StepResult("", info={"error": Ambiguous()})},
        {"reset": UnprintableError()},
        {"evaluate": UnprintableError()},
        {"step": lambda: StepResult("", info={"error": "e", "retryable": Ambiguous()}, done=True)},
        {"step": lambda: StepResult("", 1.0, True, {"error": Ambiguous()})},
    ],
)
def test_an_odd_value_of_one_env_costs_no_other_trajectory(
    template: Template, behaviour: dict[str, Any]
) -> None:
    odd = ScoredArena(2, **behaviour)
    bad, well = play_in(template, odd, ScoredArena(2))
    assert bad["reward"] is None
    assert odd.log[-1] == "close"
    assert (well["stop_reason"], well["reward"]) == ("env_done", 11.0)


def test_a_close_that_raises_what_has_no_text_costs_nothing(template: Template) -> None:
    (out,) = play_in(template, ScoredArena(2, close=UnprintableError()))
    assert out["reward"] == 11.0
    assert "UnprintableError" in out["close_error"]


@pytest.mark.parametrize("error", [RuntimeError("a fault of its own"), SystemExit(3)])
def test_a_tool_that_breaks_its_contract_costs_no_other_trajectory(
    template: Template, error: BaseException
) -> None:
    class Broken(EnvTool):
        @property
        def done(self) -> bool:
            raise error

    managers = [ToolManager([tool(Arena(2), "play")]) for tool in (Broken, EnvTool)]
    bad, well = rollout_of(Sampler(template, play), template, managers)(prompts("a", "b"))
    assert (well["stop_reason"], well["reward"]) == ("env_done", 1.0)
    assert (bad["stop_reason"], bad["reward"], bad["error_kind"]) == ("api_error", None, "internal")
    assert type(error).__name__ in bad["error"]


@pytest.mark.parametrize(
    ("observation", "text"),
    [(b"caf\xc3\xa9", "café"), ("\ud800", "�"), ([1, 2], "[1, 2]"), (None, "")],
)
def test_the_first_observation_is_text_as_that_of_a_step_is(
    template: Template, observation: Any, text: str
) -> None:
    env = Arena(1, reset=lambda: StepResult(observation, cast("Any", "no number")))
    (out,) = play_in(template, env)
    assert (out["stop_reason"], out["reward"]) == ("env_done", 0.5)
    assert out["messages"][0]["content"] == (f"0\n\n{text}" if text else "0")


def test_an_episode_that_is_over_at_its_reset_samples_nothing(template: Template) -> None:
    env = ScoredArena(reset=StepResult("over", done=True))
    (out,) = play_in(template, env)
    assert (out["stop_reason"], out["turns"], out["reward"]) == ("env_done", 0, None)
    assert env.log == ["reset", "close"]


def test_limits_hold_for_envs_that_hang(template: Template) -> None:
    release = threading.Event()
    waits: list[tuple[str, Any]] = [
        ("reset", {"reset_timeout_s": 0.1}),
        ("step", {"tool_timeout_s": 0.1}),
        ("evaluate", {"evaluate_timeout_s": 0.1}),
    ]
    for what, limit in waits:
        env = ScoredArena(1, **{what: lambda: release.wait(60) and None})
        (out,) = play_in(template, env, **limit)
        assert (out["stop_reason"], out["error_kind"], out["reward"]) == (
            "env_error",
            "timeout",
            None,
        ), what
        assert "close" in env.log
    env = ScoredArena(1, close=lambda: release.wait(60) and None)
    (out,) = play_in(template, env, close_timeout_s=0.1)
    assert (out["reward"], out["close_error"]) == (10.5, "close did not return within 0.1 s")
    release.set()


def test_a_close_that_fails_is_reported(template: Template) -> None:
    (out,) = play_in(template, Arena(1, close=OSError("busy")))
    assert (out["reward"], out["close_error"]) == (0.5, "close raised OSError: busy")


def test_a_slow_score_holds_up_no_other_trajectory(template: Template) -> None:
    finished = threading.Event()  # the other one has made its last step

    class Last(Arena):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            result = super().step(tool_name, arguments)
            if result.done:
                finished.set()
            return result

    slow = ScoredArena(1, evaluate=lambda: 1.0 if finished.wait(30) else 0.0)
    outs = play_in(template, slow, Last(4))
    assert [o["reward"] for o in outs] == [1.5, 2.0]


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_all_envs_are_closed_where_the_sampler_fails(
    template: Template, error: BaseException
) -> None:
    envs = [ScoredArena(1), ScoredArena(9), Arena(9)]

    def script(prompt: str, turn: int) -> str:
        if turn == 3:
            raise error
        return play(prompt, turn)

    with pytest.raises(type(error)):
        play_in(template, *envs, script=script)
    assert [env.log.count("close") for env in envs] == [1, 1, 1]
    assert "evaluate" not in envs[1].log


@pytest.mark.parametrize("where", ["reset", "step", "evaluate"])
def test_ctrl_c_closes_all_envs_whatever_they_do(template: Template, where: str) -> None:
    main = threading.get_ident()
    both = threading.Barrier(2, timeout=20)
    release = threading.Event()

    def block() -> None:
        if both.wait() == 0:
            signal.pthread_kill(main, signal.SIGINT)
        release.wait(60)

    envs = [ScoredArena(1, **{where: block}), ScoredArena(1, **{where: block})]
    with pytest.raises(KeyboardInterrupt):
        play_in(template, *envs)
    logs = [list(env.log) for env in envs]
    release.set()
    assert [log[-2:] for log in logs] == [[where, "close"]] * 2


def test_a_prompt_the_template_cannot_encode_still_closes_its_env() -> None:
    picky, env = Picky(Tokenizer(CHATML)), ScoredArena()
    rollout = rollout_of(Sampler(picky, play), picky, env_factory=always(env))
    (out,) = rollout(prompts("bad"), env_factory=always(env))
    assert (out["stop_reason"], out["error_kind"]) == ("env_done", None)  # the observation is in it
    env.log.clear()
    (out,) = rollout_of(
        Sampler(picky, play), picky, env_factory=always(env), reset_observation="ignore"
    )(prompts("bad"))
    assert (out["stop_reason"], out["error_kind"], out["reward"]) == ("api_error", "template", None)
    assert env.log == ["reset", "close"]


def test_one_env_for_two_trajectories_of_a_factory_is_refused(template: Template) -> None:
    env = Arena(9)
    rollout = rollout_of(Sampler(template, play), template, env_factory=always(env), max_turns=2)
    outs = rollout(prompts("a", "b"))
    assert sorted(o["stop_reason"] for o in outs) == ["env_error", "max_turns"]
    assert env.log.count("close") == 1


def test_envs_with_coroutines_run_on_one_loop(template: Template) -> None:
    class Native(Arena):
        async def areset(self, trajectory: Any = None) -> StepResult:
            self.loop = asyncio.get_running_loop()
            return self.reset(trajectory)

        async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            assert asyncio.get_running_loop() is self.loop
            return self.step(tool_name, arguments)

        async def aclose(self) -> None:
            assert asyncio.get_running_loop() is self.loop
            self.close()

    env = Native(2)
    (out,) = play_in(template, env)
    assert (out["stop_reason"], env.log) == ("env_done", ["reset", "step", "step", "close"])


def test_timing_of_the_env_is_its_own(template: Template) -> None:
    (out,) = play_in(template, ScoredArena(1))
    assert set(out["timing"]) == {
        *("queued", "reset", "model", "tools", "evaluate", "close", "total")
    }
    assert all(seconds >= 0 for seconds in out["timing"].values())


def test_a_factory_may_be_given_to_the_call(template: Template, echo: ToolManager) -> None:
    env = Arena(1)
    rollout = rollout_of(Sampler(template, play), template, echo)
    (out,) = rollout(prompts("a"), env_factory=always(env))
    assert (out["stop_reason"], env.log) == ("env_done", ["reset", "step", "close"])
    with pytest.raises(ValueError, match="exclude each other"):
        rollout(prompts("a"), env_factory=always(env), tool_manager=echo)
    with pytest.raises(ValueError, match="exclude each other"):
        rollout_of(Sampler(template, play), template, echo, env_factory=always(env))
    with pytest.raises(ValueError, match="reset_observation"):
        rollout_of(Sampler(template, play), template, echo, reset_observation="prepend")


# --- limits and attempts, which both rollouts share


def test_the_deadline_of_one_trajectory_ends_it_alone(template: Template) -> None:
    release = threading.Event()
    slow, fine = Arena(2, step=lambda: release.wait(60) and None), Arena(1)
    try:
        outs = play_in(template, slow, fine, deadline_s=0.5)
    finally:
        release.set()
    assert [out["stop_reason"] for out in outs] == ["deadline", "env_done"]
    assert outs[0]["error"].startswith("deadline_s=0.5 passed")
    assert outs[0]["error_kind"] == "timeout"
    assert outs[1]["reward"] == 0.5


def test_a_lost_episode_is_sampled_again_in_a_new_env(template: Template) -> None:
    lost = StepResult.failed(SandboxLostError("the sandbox is lost"))
    envs = [Arena(2, step=lost), Arena(2), Arena(1)]
    left = {"0": [envs[0], envs[1]], "1": [envs[2]]}

    def factory(trajectory: Any) -> Any:
        return left[trajectory["messages"][0]["content"]].pop(0)

    rollout = rollout_of(Sampler(template, play), template, env_factory=factory, max_attempts=3)
    again, once = rollout(prompts("0", "1"))
    assert (again["reward"], again["attempts"], again["turns"]) == (1.0, 2, 2)
    assert "the sandbox is lost" in again["earlier_errors"][0]
    assert again["timing"]["earlier"] > 0
    assert (once["attempts"], once["earlier_errors"]) == (1, [])
    assert all(env.log[-1] == "close" for env in envs)
    sampled = [*Sampler(template, play).ids(call_text("x", "play"))] * 2
    assert trained(again) == sampled  # of the last attempt alone


def test_on_done_gets_each_trajectory_once_as_it_ends(template: Template) -> None:
    ended: list[str] = []
    long_may_end = threading.Event()

    def on_done(out: Any) -> None:
        ended.append(out["messages"][0]["content"][0])
        long_may_end.set()

    long = Arena(1, step=lambda: None if long_may_end.wait(30) else StepResult.failed("late"))
    outs = play_in(template, long, Arena(1), on_done=on_done)
    assert ended == ["1", "0"]
    assert [out["reward"] for out in outs] == [0.5, 0.5]


def test_calls_of_one_message_beyond_the_cap_are_not_run(template: Template) -> None:
    many = "".join(call_text(str(number), "play") for number in range(130))
    env = Arena(1000)
    (out,) = play_in(template, env, script=always(many), max_turns=1)
    assert env.steps == 128
    assert out["tool_errors"] == {"too_many_calls": 2}
    assert [m["role"] for m in out["messages"]].count("tool") == 128
    assert len(out["messages"][1]["tool_calls"]) == 128


def test_a_call_that_the_parser_drops_is_counted(template: Template, echo: ToolManager) -> None:
    class OneCall(Template):
        def parse_tool_call(self, decoded: str) -> list[Any]:
            return super().parse_tool_call(decoded)[:1]

    def script(prompt: str, turn: int) -> str:
        return call_text("a") + call_text("b") if turn == 1 else "end"

    one_call = OneCall(template.tokenizer)
    (out,) = rollout_of(Sampler(one_call, script), one_call, echo)(prompts("a"))
    assert out["unparsed_tool_calls"] == 1
    assert out["stop_reason"] == "stop"


@pytest.mark.parametrize(
    ("reason", "stop_reason", "kind"),
    [
        ({"type": "stop"}, "stop", None),
        ({"type": "length", "length": 8}, "length", None),
        ({"type": "abort", "message": "out of memory"}, "api_error", "server_error"),
        (None, "api_error", "bad_reply"),
    ],
)
def test_a_finish_reason_may_be_an_object(
    template: Template, echo: ToolManager, reason: Any, stop_reason: str, kind: str | None
) -> None:
    sampler = Sampler(template, lambda p, turn: "end")

    def set_reason(sequence: Any) -> None:
        sequence.stop_reason = reason

    sampler.change = set_reason
    odd, fine = rollout_of(sampler, template, echo)(prompts("a", "b"))
    assert (odd["stop_reason"], odd["error_kind"], odd["turns"]) == (stop_reason, kind, 1)
    assert fine["stop_reason"] == stop_reason  # neither costs the batch


# --- groups and failures


def test_groups_are_sampled_in_one_batch_and_a_failed_one_is_left_out(template: Template) -> None:
    lost = StepResult.failed(SandboxLostError("the sandbox is lost"))
    made: list[Any] = []

    def factory(trajectory: Any) -> Any:
        fails = trajectory["messages"][0]["content"] == "b" and trajectory["sample"] == 1
        made.append(Arena(1, step=lost if fails else None))
        return made[-1]

    sampler = Sampler(template, play)
    policy = FailurePolicy(by_kind={"sandbox_lost": "drop_group"})
    rollout = rollout_of(
        sampler, template, env_factory=factory, group_size=2, failure_policy=policy
    )
    outs = rollout(prompts("a", "b", "c"))
    assert sampler.batches == [6]
    assert [(out["group_id"], out["sample"]) for out in outs] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert [out["reward"] for out in outs] == [0.5] * 4
    seeds = [env.trajectory["user_data"]["seed"] for env in made]
    assert len(set(seeds)) == 3
    assert (outs.coverage.asked, outs.coverage.scored, outs.coverage.dropped) == (6, 5, 2)
    assert all(env.log[-1] == "close" for env in made)
    assert all(len(out["turn_timings"]) == out["turns"] for out in outs)


def test_a_failure_that_ends_the_rollout_closes_all_envs(template: Template) -> None:
    lost = StepResult.failed(SandboxLostError("the sandbox is lost"))
    envs = [Arena(9), Arena(9, step=lost), Arena(9)]
    policy = FailurePolicy(default="fail")
    with pytest.raises(RolloutFailedError, match="the sandbox is lost"):
        play_in(template, *envs, failure_policy=policy, max_turns=9)
    assert all(env.log[-1] == "close" for env in envs)
    assert envs[0].steps < 9
