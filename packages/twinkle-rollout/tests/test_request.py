from __future__ import annotations

import json
from typing import Any

import pytest

from twinkle_agentic.protocol import SamplingParams
from twinkle_agentic.protocol._request import Conversation, request_body

PARAMS = SamplingParams(max_tokens=3)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "“ü”"}}]


def body(messages: Any, overrides: Any = None, **trajectory: Any) -> dict[str, Any]:
    return json.loads(
        request_body("m", {"messages": messages, **trajectory}, PARAMS, overrides or {})
    )


@pytest.mark.parametrize("overrides", [{}, {"a": [1]}, {"model": "other"}, {"messages": []}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_conversation_is_written_as_any_list(overrides: Any, tools: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    conversation = Conversation(messages)
    for text in ("b", "\ud83d", 'c"'):
        assert body(conversation, overrides, tools=tools) == body(messages, overrides, tools=tools)
        messages.append({"role": "user", "content": text})
        conversation.append({"role": "user", "content": text})


def test_other_settings_are_noticed() -> None:
    conversation = Conversation([{"role": "user", "content": "a"}])
    assert body(conversation, {"a": 1})["a"] == 1
    assert body(conversation, {"a": 2})["a"] == 2
    assert "tools" in body(conversation, tools=TOOLS)
    assert "tools" not in body(conversation, tools=None)


class Counted(dict[str, Any]):
    """Counts how often it is written."""

    written = 0

    def items(self) -> Any:
        Counted.written += 1
        return super().items()


def test_each_message_is_written_once() -> None:
    conversation = Conversation([])
    for _ in range(5):
        conversation.append({"role": "user", "content": Counted(text="a")})
        before = Counted.written
        body(conversation)
        assert Counted.written == before + 1


@pytest.mark.parametrize("make", [list, Conversation])
def test_no_lone_surrogate_reaches_the_wire(make: Any) -> None:
    """Servers refuse a request with one, and every later request of its conversation."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "name": "a\ud800", "content": [{"type": "text", "text": "b\udfff😀"}]},
        {"role": "tool", "tool_call_id": "\ud83d", "content": "two halves \ud83d\ude00"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "c\ud800"}}]
    sent = request_body("m", {"messages": make(messages), "tools": tools}, PARAMS, {})
    first, second = json.loads(sent)["messages"]
    assert (first["name"], first["content"][0]["text"]) == ("a�", "b�😀")
    assert (second["tool_call_id"], second["content"]) == ("�", "two halves 😀")
    assert json.loads(sent)["tools"][0]["function"]["description"] == "c�"


@pytest.mark.parametrize("bad", [float("nan"), object(), {1, 2}])
def test_what_is_no_json_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        body([{"role": "user", "content": bad}])
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        body(Conversation([{"role": "user", "content": bad}]))
