"""Messages that any chat-completions server accepts.

What a model wrote may be no valid request any more: null or repeated call ids, arguments that are
no JSON, calls without an answer. Sent back as it is, it makes every later request fail. The
functions here bring history into the form of the protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.protocol._fields import fields_of, items_of
from twinkle_agentic.tools._arguments import parse_arguments
from twinkle_agentic.tools.text import clean_text, to_text

__all__ = [
    "KNOWN_FINISHES",
    "MAX_CALLS",
    "NOT_EXECUTED",
    "Reply",
    "finish_word",
    "holds_call",
    "looks_like_call",
    "marked_calls",
    "read_reply",
    "tool_message",
    "wire_history",
]

NOT_EXECUTED = "Error: not executed"
"""How the answer to a call that was never run begins."""

MAX_CALLS = 128
"""Calls taken of one message; a model that loops can write a million, each a step of its env."""

KNOWN_FINISHES = frozenset({"stop", "tool_calls", "function_call", "length", "content_filter"})
"""The finish reasons of the protocol; with any other word a turn is not known to be complete."""

_CALL_FINISHES = frozenset({"tool_calls", "function_call"})
_CUT_FINISHES = frozenset({"length", "content_filter"})
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the protocol's rule for function names
_CALL_MARKS = re.compile(
    r"<tool_calls?>|<function_calls?>|<function=|<\|tool_call|<\|python_tag\|>|\[TOOL_CALLS\]"
    r"|<｜tool▁calls?▁begin｜>|<invoke name=|<\|channel\|>commentary to=functions|```tool_call"
    r"|<minimax:tool_call>|<\|action_start\|>|<arg_key>"
)


@dataclass(slots=True)
class Reply:
    """One assistant message, taken in.

    Attributes:
        message: For the output: valid, with `finish_reason` and `reasoning_content` where they were
            given.
        wire: For the next request.
        calls: To execute, in order: the model's own name and arguments, with the ids of `message`.
        finish_reason: As the server said, `None` where it said nothing.
        reasoning: Text of the reasoning, empty where there was none.
        repaired: Whether `message` differs from what the model wrote.
        dropped_calls: Calls beyond `MAX_CALLS`, which are neither kept nor executed.
        unreadable_calls: The server says that there are calls, but there is none to read.
    """

    message: dict[str, Any]
    wire: dict[str, Any]
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    finish_reason: str | None = None
    reasoning: str = ""
    repaired: bool = False
    dropped_calls: int = 0
    unreadable_calls: bool = False


def finish_word(value: object) -> str | None:
    """Return a finish reason as one word; some servers send `{"type": ...}`."""
    if isinstance(value, Mapping):
        value = cast("Mapping[str, Any]", value).get("type", value)
    return None if value is None else str(value)


def read_reply(
    reply: object,
    *,
    turn: int,
    used_ids: set[str],
    offered: Collection[str],
    keep_reasoning: bool = True,
    keep_cut_calls: bool = False,
) -> Reply:
    """Take in a message from the model; the calls of a turn that was cut are dropped.

    Args:
        reply: The message as the API object returned it, anything.
        turn: Number of the turn, for ids made up here.
        used_ids: Call ids of the conversation; those of this message are added.
        offered: Names of the tools; other names are brought into the protocol's form.
        keep_reasoning: Whether the next request carries the reasoning, in the field it came in.
        keep_cut_calls: Whether the calls of a turn that was cut stay.
    """
    if not isinstance(reply, Mapping):
        text = clean_text("" if reply is None else str(reply))
        message = {"role": "assistant", "content": text}
        return Reply(message, dict(message), repaired=True)
    given = cast("Mapping[str, Any]", reply)
    finish = finish_word(given.get("finish_reason"))
    was_cut = finish in _CUT_FINISHES and not keep_cut_calls
    content = _assistant_text(given.get("content"))
    wire: dict[str, Any] = {"role": "assistant", "content": content}
    repaired = content != (given.get("content") or "")
    calls: list[dict[str, Any]] = []
    raw_calls = _call_list(given.get("tool_calls"))
    dropped = max(0, len(raw_calls) - MAX_CALLS)
    raw_calls = raw_calls[:MAX_CALLS]
    repaired = repaired or dropped > 0
    if raw_calls and not was_cut:
        valid: list[dict[str, Any]] = []
        for position, raw in enumerate(raw_calls):
            call = _valid_call(raw, f"call_{turn}_{position}", used_ids, offered)
            repaired = repaired or call != raw
            valid.append(call)
            function = fields_of(raw).get("function")
            calls.append({"id": call["id"], "type": "function", "function": function})
        wire["tool_calls"] = valid
    elif raw_calls:
        repaired = True
    message = dict(wire)
    for name in ("finish_reason", "reasoning", "reasoning_content", "refusal"):
        if given.get(name):
            message[name] = given[name]
    reasoning = _reasoning_of(given)
    if reasoning:
        message["reasoning_content"] = next(iter(reasoning.values()))
    if keep_reasoning:
        wire.update(reasoning)
    promised = given.get("tool_calls") or given.get("function_call")
    lost = not raw_calls and not was_cut and bool(promised or finish in _CALL_FINISHES)
    return Reply(
        message,
        wire,
        calls,
        finish,
        next(iter(reasoning.values()), ""),
        repaired or lost,
        dropped_calls=dropped,
        unreadable_calls=lost,
    )


def wire_history(
    messages: Sequence[Mapping[str, Any]],
    *,
    used_ids: set[str],
    offered: Collection[str] = (),
    keep_reasoning: bool = False,
) -> list[dict[str, Any]]:
    """Bring a conversation into the form of the protocol.

    Every call gets exactly one answer, right after its message and in call order: by id, or by
    position where ids are missing; a call without one is answered with an error text. Tool messages
    that answer nothing are left out.

    Args:
        messages: Any conversation; not changed.
        used_ids: Takes up the call ids found.
        offered: Names of the tools.
        keep_reasoning: Whether the reasoning of earlier turns stays.
    """
    wire: list[dict[str, Any]] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        role = message.get("role")
        if role == "tool":
            continue  # answers are taken where their calls are
        if role != "assistant":
            wire.append(_plain_message(message))
            continue
        clean = {"role": "assistant", "content": _assistant_text(message.get("content"))}
        if isinstance(message.get("name"), str):
            clean["name"] = message["name"]
        if keep_reasoning:
            clean.update(_reasoning_of(message))
        wire.append(clean)
        raw_calls = _call_list(message.get("tool_calls"))
        if not raw_calls:
            continue
        answers: list[Mapping[str, Any]] = []
        while position < len(messages) and messages[position].get("role") == "tool":
            answers.append(messages[position])
            position += 1
        calls = [
            _valid_call(raw, f"call_{len(wire)}_{number}", used_ids, offered)
            for number, raw in enumerate(raw_calls)
        ]
        clean["tool_calls"] = calls
        wire.extend(_paired(raw_calls, calls, answers))
    return wire


def tool_message(call_id: str, text: str) -> dict[str, Any]:
    """Make the answer to a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def looks_like_call(text: object) -> bool:
    """Return whether a text holds a tool call in one of the markups that servers parse."""
    return isinstance(text, str) and bool(_CALL_MARKS.search(text))


def holds_call(reply: Reply) -> bool:
    """Return whether a call was left in the text or the reasoning, or lost by the server."""
    texts = (reply.message.get("content"), reply.reasoning)
    return reply.unreadable_calls or any(looks_like_call(text) for text in texts)


def marked_calls(text: str) -> int:
    """Return how many calls a text opens, in the markups that open each call alike."""
    return max(text.count(mark) for mark in ("<tool_call>", "<function=", "<invoke name="))


def _reasoning_of(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the reasoning under the name of the field it came in; empty where there is none."""
    for name in ("reasoning", "reasoning_content"):
        text = message.get(name)
        if isinstance(text, str) and text:
            return {name: clean_text(text)}
    return {}


def _paired(
    raw_calls: Sequence[Any], calls: Sequence[dict[str, Any]], answers: list[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    left = list(answers)
    chosen: list[Mapping[str, Any] | None] = []
    for raw in raw_calls:
        raw_id = fields_of(raw).get("id")
        match = next((a for a in left if raw_id and a.get("tool_call_id") == raw_id), None)
        if match is not None:
            left = [a for a in left if a is not match]
        chosen.append(match)
    # What carries no id that fits goes by position.
    left = [a for a in left if not a.get("tool_call_id")] or (left if not any(chosen) else [])
    paired: list[dict[str, Any]] = []
    for call, match in zip(calls, chosen, strict=True):
        answer = match if match is not None else (left.pop(0) if left else None)
        text = f"{NOT_EXECUTED}." if answer is None else _content(answer.get("content"))
        paired.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return paired


def _valid_call(
    raw: object, fallback_id: str, used_ids: set[str], offered: Collection[str]
) -> dict[str, Any]:
    call = fields_of(raw)
    call_id: Any = call.get("id")
    if isinstance(call_id, str):
        call_id = clean_text(call_id)
    if not isinstance(call_id, str) or not call_id or call_id in used_ids:
        call_id, number = fallback_id, 1
        while call_id in used_ids:
            number += 1
            call_id = f"{fallback_id}_{number}"
    used_ids.add(call_id)
    function = fields_of(call.get("function"))
    name: Any = function.get("name")
    if not isinstance(name, str) or not name:
        name = "invalid_call"
    elif name not in offered and not _NAME.fullmatch(name):
        name = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": _object_text(function.get("arguments"))},
    }


def _object_text(arguments: object) -> str:
    """Return arguments as the text of a JSON object; `{}` where they are none."""
    try:
        value = parse_arguments(arguments)
        if (
            isinstance(arguments, str)
            and arguments.lstrip().startswith("{")
            and "\\ud" not in arguments.lower()  # no escaped surrogate in it
        ):
            return clean_text(arguments)
        return clean_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return "{}"


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    clean: dict[str, Any] = {
        "role": message.get("role") or "user",
        "content": _content(message.get("content")),
    }
    if isinstance(message.get("name"), str):
        clean["name"] = message["name"]
    return clean


def _content(content: object) -> Any:
    if isinstance(content, str):
        return clean_text(content)
    if isinstance(content, list):
        return cast("list[Any]", content)  # parts: text, images, ...
    return to_text(content, max_chars=None)


def _assistant_text(content: object) -> Any:
    """Return an assistant's content as text; the text parts joined where it came in parts."""
    if not isinstance(content, list):
        return _content(content)
    texts: list[str] = []
    for part in items_of(cast("object", content)):
        text: Any = part if isinstance(part, str) else fields_of(part).get("text")
        if isinstance(text, str):
            texts.append(text)
    return clean_text("".join(texts))


def _call_list(calls: object) -> list[Any]:
    if isinstance(calls, Mapping):
        return [cast("Any", calls)]
    return items_of(calls)
