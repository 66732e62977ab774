"""The tokens between two sampled turns: tool messages and the next generation prompt.

Sampled ids stay as they are. Only what the chat template puts after them is rendered, in the
context of the whole conversation, and labelled -100.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.protocol._fields import fields_of, items_of
from twinkle_agentic.rollout.sampler import Template
from twinkle_agentic.tools._arguments import parse_arguments

__all__ = ["IGNORED", "BridgeError", "append_ids", "bridge_ids", "extend_with_bridge", "plain"]

IGNORED = -100
"""The label of tokens nothing is learnt from."""


class BridgeError(RuntimeError):
    """The chat template does not render a longer conversation as a continuation."""


def bridge_ids(
    template: Template,
    before: Sequence[Mapping[str, Any]],
    added: Sequence[Mapping[str, Any]],
    *,
    last_id: int | None,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Return the ids that follow a sampled turn up to the start of the next one.

    Args:
        template: Its tokenizer renders and encodes.
        before: The conversation up to and with the sampled message.
        added: The tool messages.
        last_id: The last sampled id. Where it is the end-of-turn token, what the template puts
            after that token (a line break in most) comes first; where it is not, the token itself
            comes before that.
        tools: Definitions, where the prompt was rendered with them.

    Raises:
        BridgeError: The rendering is no continuation, or adds nothing.
    """
    tokenizer = template.tokenizer
    options: dict[str, Any] = {"enable_thinking": getattr(template, "enable_thinking", False)}
    if tools:
        options["tools"] = list(tools)

    def render(messages: list[dict[str, Any]], *, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **options
        )

    shorter = [_renderable(message) for message in before]
    longer = [*shorter, *(_renderable(message) for message in added)]
    head = render(shorter, prompt=False)
    whole = render(longer, prompt=True)
    if not whole.startswith(head):
        common = next((i for i, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), 0)
        raise BridgeError(
            "the chat template rewrites earlier turns when a tool message follows: "
            f"{head[common : common + 60]!r} became {whole[common : common + 60]!r}"
        )
    eos = getattr(tokenizer, "eos_token", None)
    ended = last_id == getattr(tokenizer, "eos_token_id", None)
    text = _after_turn(head, eos, ended)
    text += whole[len(head) :]
    ids = list(tokenizer.encode(text, add_special_tokens=False)) if text else []
    if not ids:
        raise BridgeError("the chat template renders nothing for a tool message")
    return ids


def append_ids(
    template: Template, feature: Mapping[str, Any], ids: Sequence[int]
) -> dict[str, Any] | None:
    """Append ids that nothing is learnt from.

    Args:
        template: Brings masks, positions and the shift of `labels` up to date.
        feature: `input_ids` and shifted `labels`; not changed. Large values (images) are shared.
        ids: What to append.

    Returns:
        The longer input; `None` where the template drops it for its length.

    Raises:
        BridgeError: `labels` and `input_ids` differ in length.
    """
    longer = dict(feature)
    before = list(longer["input_ids"])
    labels = list(longer.get("labels") or [IGNORED] * len(before))
    if len(labels) != len(before):
        raise BridgeError(f"{len(before)} input_ids, but {len(labels)} labels")
    longer["input_ids"] = before + list(ids)
    longer["labels"] = labels[-1:] + labels[:-1] + [IGNORED] * len(ids)  # back in input order
    _pad_token_types(longer, len(ids))
    pipeline = getattr(template, "_invoke_post_pipeline", None)
    if pipeline is None:
        longer.update(_shifted(longer))
        return longer
    refreshed = pipeline([longer])
    if not refreshed:
        return None
    longer.update(refreshed[0])
    return plain(longer)


def extend_with_bridge(
    feature: Mapping[str, Any], tool_messages: Sequence[Mapping[str, Any]], template: Template
) -> dict[str, Any] | None:
    """Append tool messages and the next generation prompt to a model input.

    Args:
        feature: `input_ids` that end with a sampled turn, `labels`, `messages`; not changed.
        tool_messages: The answers to the calls of that turn.
        template: As for `MultiTurnRollout`.

    Returns:
        The longer input with the longer `messages`; `None` where the template drops it for its
        length.

    Raises:
        BridgeError: The chat template does not render it as a continuation.
    """
    messages = items_of(feature.get("messages"))
    last_id = int(feature["input_ids"][-1])
    ids = bridge_ids(template, messages, tool_messages, last_id=last_id)
    longer = append_ids(template, feature, ids)
    if longer is not None:
        longer["messages"] = [*messages, *tool_messages]
    return longer


def plain(value: Any) -> Any:
    """Turn numpy values into lists and numbers, at any depth; leave tensors and all else."""
    if type(value).__module__.split(".")[0] == "numpy":
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        if items and isinstance(items[0], int):  # ids and labels: nothing to convert inside
            return list(items)
        return [plain(item) for item in items]
    return value


def _after_turn(head: str, eos: str | None, ended: bool) -> str:
    """Return what the template puts behind the last message, from the end-of-turn token on."""
    at = head.rfind(eos) if eos else -1
    if not eos or at < 0:
        return ""
    closing = head[at + len(eos) :]
    if closing.strip():  # the token is not what ends the last message
        return ""
    return closing if ended else eos + closing


def _renderable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates want it: arguments as objects."""
    copy = dict(message)
    calls = items_of(copy.get("tool_calls"))
    if not calls:
        return copy
    copy["tool_calls"] = [
        {
            **fields_of(call),
            "function": {
                **fields_of(fields_of(call).get("function")),
                "arguments": _object(fields_of(fields_of(call).get("function")).get("arguments")),
            },
        }
        for call in calls
    ]
    return copy


def _object(arguments: object) -> dict[str, Any]:
    try:
        return parse_arguments(arguments)
    except ValueError:
        return {}


def _shifted(feature: dict[str, Any]) -> dict[str, Any]:
    length = len(feature["input_ids"])
    labels = feature["labels"]
    return {
        "labels": labels[1:] + labels[:1],
        "attention_mask": [1] * length,
        "position_ids": list(range(length)),
        "length": length,
    }


def _pad_token_types(feature: dict[str, Any], count: int) -> None:
    """Lengthen the token types of a multimodal input; what is appended is text (0)."""
    types: Any = feature.get("mm_token_type_ids")
    if types is None:
        return
    if hasattr(types, "new_zeros"):  # a tensor
        torch: Any = importlib.import_module("torch")
        zeros = types.new_zeros((*types.shape[:-1], count))
        feature["mm_token_type_ids"] = torch.cat([types, zeros], dim=-1)
        return
    rows: list[Any] = plain(types)
    if rows and isinstance(rows[0], list):
        feature["mm_token_type_ids"] = [[*row, *[0] * count] for row in rows]
    else:
        feature["mm_token_type_ids"] = [*rows, *[0] * count]
