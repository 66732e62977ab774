"""How the model samples. Any object with these attributes will do, twinkle's own class included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["SamplingParams", "sampling_fields"]


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling settings of one request.

    Attributes:
        max_tokens: Most tokens of one turn; `None` leaves it to the server.
        seed: For servers that sample reproducibly.
        stop: Text (or several) that ends a turn; integers are token ids (`stop_token_ids`, vLLM and
            SGLang).
        temperature: >= 0.
        top_k: > 0, or -1 for all tokens. Sent only when set: the OpenAI service does not know it.
        top_p: In (0, 1].
        repetition_penalty: > 0; 1 is none. Sent under its own name when set: the OpenAI service
            does not know it (its `frequency_penalty` is another formula).
        logprobs: How many alternatives to report per token (`top_logprobs`); 0 is the sampled one
            only, `None` asks for no log probabilities.
        prompt_logprobs: The same for prompt tokens (vLLM).
        num_samples: Messages per request; a rollout takes 1 only.

    Raises:
        ValueError: A value is out of its range.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1

    def __post_init__(self) -> None:
        _check(
            "max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, ">= 1"
        )
        _check("temperature", self.temperature, self.temperature >= 0, ">= 0")
        _check("top_k", self.top_k, self.top_k == -1 or self.top_k >= 1, ">= 1, or -1 for all")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "> 0")
        _check("logprobs", self.logprobs, self.logprobs is None or self.logprobs >= 0, ">= 0")
        _check("num_samples", self.num_samples, self.num_samples >= 1, ">= 1")


def sampling_fields(params: Any) -> dict[str, Any]:
    """Turn sampling settings into fields of a chat-completions request.

    Args:
        params: `SamplingParams`, an object with some of its attributes, or a mapping. Absent
            attributes have their defaults.
    """

    def get(name: str, default: Any) -> Any:
        if isinstance(params, Mapping):
            return cast("Mapping[str, Any]", params).get(name, default)
        return getattr(params, name, default)

    body: dict[str, Any] = {
        "n": get("num_samples", 1),
        "temperature": get("temperature", 1.0),
        "top_p": get("top_p", 1.0),
    }
    for name in ("max_tokens", "seed", "prompt_logprobs"):
        if (value := get(name, None)) is not None:
            body[name] = value
    stop: Any = get("stop", None)
    if stop:
        texts: list[Any] = [stop] if isinstance(stop, str) else list(stop)
        body["stop_token_ids" if isinstance(texts[0], int) else "stop"] = texts
    if (logprobs := get("logprobs", None)) is not None:
        body["logprobs"] = True
        body["top_logprobs"] = logprobs
    if (top_k := get("top_k", -1)) is not None and top_k > 0:
        body["top_k"] = top_k
    if (penalty := get("repetition_penalty", 1.0)) not in (None, 1.0):
        body["repetition_penalty"] = penalty
    return body


def _check(name: str, value: object, good: bool, wanted: str) -> None:
    if not good:
        raise ValueError(f"{name} must be {wanted}, found {value!r}")
