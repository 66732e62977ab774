"""twinkle-kit 0.5.1 with our wheels in the place of its envs, tools and rollout.

Not part of the default tests: `nox -s twinkle-kit` installs twinkle-kit, then our wheels over it.
"""

from __future__ import annotations

import inspect
import json
from importlib import metadata
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast
from twinkle import DeviceMesh
from twinkle.data_format.sampling import SampledSequence, SampleResponse, SamplingParams
from twinkle.template.base import Template

from twinkle_agentic.chunker.native import NativeChunker
from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.envs import Env, EnvPool, StepResult
from twinkle_agentic.rollout import MultiTurnCondenseRollout, MultiTurnRollout, extend_with_bridge
from twinkle_agentic.tools import FunctionTool, ToolManager

CHATML = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """A template of twinkle-kit over a tokenizer that is trained here."""
    folder = tmp_path_factory.mktemp("model")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world", "the tool call is here", "assistant user"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return Template(str(folder))


class ScriptedSampler:
    """Says, turn by turn, what `script` has; the samples are those of a real sampler's types."""

    def __init__(self, template: Template, script: list[str]) -> None:
        self.template, self.script = template, script
        self.prompts: list[str] = []

    def sample(self, inputs: list[Any], sampling_params: Any = None) -> list[SampleResponse]:
        responses: list[SampleResponse] = []
        for feature in inputs:
            self.prompts.append(self.template.tokenizer.decode(feature["input_ids"]))
            turn = sum(m["role"] == "assistant" for m in feature["messages"])
            tokens = self.template.tokenizer.encode(self.script[turn] + "<|im_end|>")
            sequence = SampledSequence(
                stop_reason="stop",
                tokens=tokens,
                logprobs=[[(token, -0.5)] for token in tokens],
                decoded=self.template.tokenizer.decode(tokens, skip_special_tokens=True),
                new_input_feature=self.template.concat_input_feature(feature, tokens),
            )
            responses.append(SampleResponse(sequences=[sequence]))
        return responses


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def shout(text: str) -> str:
    """Return the text in capitals."""
    return text.upper()


def trained(feature: Any, template: Template) -> str:
    """Return the text whose tokens have a label: labels are shifted by one."""
    labels = list(feature["labels"])
    labels = labels[-1:] + labels[:-1]
    return template.tokenizer.decode([label for label in labels if label != -100])


def test_ours_are_in_the_place_of_the_kits() -> None:
    assert metadata.version("twinkle-kit") == "0.5.1"
    ours = {str(path) for path in metadata.files("twinkle-rollout") or ()}
    assert {"twinkle_agentic/rollout/multi_turn.py", "twinkle_agentic/rollout/base.py"} <= ours
    assert "deadline_s" in inspect.signature(MultiTurnRollout.__init__).parameters
    assert issubclass(MultiTurnCondenseRollout, MultiTurnRollout)
    assert callable(extend_with_bridge)


def test_our_rollout_with_a_template_of_the_kit(template: Template) -> None:
    turns = [call("shout", text="hello"), "It says HELLO."]
    sampler = ScriptedSampler(template, turns)
    manager = ToolManager()
    manager.register(FunctionTool(shout))
    rollout = MultiTurnRollout(
        sampler, template, tool_manager=manager, sampling_params=SamplingParams(), max_turns=4
    )
    (done,) = rollout([{"messages": [{"role": "user", "content": "shout hello"}]}])
    assert done["error"] is None
    assert [m["role"] for m in done["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert done["messages"][2]["content"] == "HELLO"
    assert "<tool_response>\nHELLO\n</tool_response>" in sampler.prompts[1]
    assert trained(done, template) == "".join(f"{turn}<|im_end|>" for turn in turns)


class Halves(Condenser):
    """Keeps the first half of long texts."""

    def __call__(self, chunks: Any, **kwargs: Any) -> Any:
        for chunk in chunks.chunks:
            text = chunk.get("content")
            if isinstance(text, str) and len(text) > 100:
                chunk["raw"] = {**(chunk.get("raw") or {}), "condensed": True, "original": text}
                chunk["content"] = text[: len(text) // 2]
        return chunks


def test_the_kits_condensing_rollout_runs_on_ours(template: Template) -> None:
    text = " ".join(f"fact number {number} is here." for number in range(20))
    sampler = ScriptedSampler(template, [call("extract_condensed", blocks=1), "Fact 19 is here."])
    rollout = MultiTurnCondenseRollout(
        sampler=sampler,
        template=template,
        tool_manager=ToolManager(),
        chunker=NativeChunker(chunk_size=4096),
        condenser=Halves(),
        max_turns=3,
    )
    (done,) = rollout([{"messages": [{"role": "user", "content": text}]}])
    assert "<block_1>" in sampler.prompts[0]
    assert "fact number 19" not in sampler.prompts[0]
    assert "fact number 19" in sampler.prompts[1]
    assert done["error"] is None


class Counter(Env):
    """Counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, trajectory: Any = None) -> StepResult:
        self.steps = 0
        return StepResult("0")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.steps += 1
        return StepResult(str(self.steps), 1.0, done=self.steps == 3)


def test_a_device_mesh_of_the_kit_makes_the_workers_of_a_pool() -> None:
    mesh = DeviceMesh.from_sizes(world_size=2, dp_size=2)
    with EnvPool(4, mesh, env_factory=Counter, ray_options={"address": "local"}) as pool:
        assert pool.num_workers == 2
        pool.reset_batch(range(4))
        adapters = pool.get_adapters(4)
        assert [one.step("count", {}).observation for one in adapters] == ["1"] * 4
