"""What `MultiTurnRollout` needs of a sampler and a template; twinkle's classes fit as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["SampleResponse", "SampledSequence", "Sampler", "Template", "Tokenizer"]


class SampledSequence(Protocol):
    """One sampled turn."""

    @property
    def stop_reason(self) -> str | None:
        """`stop`, `length`, `abort` or `error`."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """The sampled ids."""
        ...

    @property
    def logprobs(self) -> Sequence[Any] | None:
        """One entry per sampled id."""
        ...

    @property
    def decoded(self) -> str | None:
        """The text of the ids."""
        ...

    @property
    def new_input_feature(self) -> Any:
        """The input with ids and assistant message appended; `None` leaves that to the template."""
        ...


class SampleResponse(Protocol):
    """The answer to one input of a batch."""

    @property
    def sequences(self) -> Sequence[SampledSequence]:
        """One sequence for `num_samples=1`."""
        ...


class Sampler(Protocol):
    """Samples one turn for each input of a batch.

    An optional `device_mesh.data_world_size` says how many inputs a batch must have at least.
    """

    def sample(self, inputs: list[Any], sampling_params: Any = None) -> Sequence[SampleResponse]:
        """Return one response per input, in order."""
        ...


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used."""

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a turn."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """Its id."""
        ...

    def apply_chat_template(self, conversation: list[Any], **kwargs: Any) -> Any:
        """Render messages.

        Called with `tokenize=False`, `add_generation_prompt`, `tools` and `enable_thinking`.
        """
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turn text into ids."""
        ...


class Template(Protocol):
    """Turns trajectories into model inputs.

    An input is a dict with `input_ids`, `labels` (shifted by one to the left: `labels[i]` is the
    target of `input_ids[i]`; -100 where nothing is learnt) and `messages`. Optional:
    `_invoke_post_pipeline(inputs)` (brings masks, positions and the shift of `labels` up to date;
    an empty list drops the input), `concat_input_feature(input, tokens)`, `enable_thinking`,
    `truncation_strategy`.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> Any:
        """Turn a trajectory into an input."""
        ...

    def parse_tool_call(self, decoded: str) -> list[Any]:
        """Find the tool calls in a sampled text."""
        ...
