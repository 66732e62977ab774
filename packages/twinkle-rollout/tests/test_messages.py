from __future__ import annotations

import json
from typing import Any

import pytest

from twinkle_agentic.protocol._messages import looks_like_call, read_reply, wire_history

USER = {"role": "user", "content": "q"}


def call(id: Any = "a", name: Any = "f", arguments: Any = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def history(*messages: dict[str, Any], offered: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return wire_history([USER, *messages], used_ids=set(), offered=offered)[1:]


def test_only_fields_of_the_protocol_are_kept() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [],
        "finish_reason": "stop",
        "reasoning_content": "hm",
    }
    assert history(message) == [{"role": "assistant", "content": ""}]


def test_each_call_gets_one_answer_in_call_order() -> None:
    wire = history(
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("c")]},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "b", "content": "B again"},
        {"role": "tool", "tool_call_id": "zzz", "content": "nobody's"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
        USER,
    )
    answers = [(m["tool_call_id"], m["content"]) for m in wire if m["role"] == "tool"]
    assert answers == [("a", "A"), ("b", "B"), ("c", "Error: not executed.")]
    assert wire[-1] == USER


def test_answers_without_ids_go_by_position() -> None:
    wire = history(
        {"role": "assistant", "content": "", "tool_calls": [call(None), call(None)]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": {"n": 2}},
    )
    ids = [c["id"] for c in wire[0]["tool_calls"]]
    assert len(set(ids)) == 2
    assert [(m["tool_call_id"], m["content"]) for m in wire[1:]] == [
        (ids[0], "one"),
        (ids[1], '{"n": 2}'),
    ]


def test_ids_are_unique_over_the_whole_conversation() -> None:
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call("a")]},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
    ]
    wire = history(*turn, *turn)
    assert [m["content"] for m in wire if m["role"] == "tool"] == ["A", "A"]
    assert wire[0]["tool_calls"][0]["id"] != wire[2]["tool_calls"][0]["id"]
    assert wire[2]["tool_calls"][0]["id"] == wire[3]["tool_call_id"]


def test_a_tool_message_that_answers_nothing_is_left_out() -> None:
    assert history({"role": "tool", "tool_call_id": "a", "content": "x"}, USER) == [USER]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": "cut', {}),
        ("[1, 2]", {}),
        ("3", {}),
        ("", {}),
        (None, {}),
        ('{"a": NaN}', {}),
        ({"a": float("inf")}, {}),
        ("[" * 100_000, {}),
        ('{"a": "\\ud800"}', {"a": "�"}),
    ],
)
def test_arguments_are_the_text_of_an_object(given: Any, sent: Any) -> None:
    wire = history({"role": "assistant", "content": "", "tool_calls": [call(arguments=given)]})
    assert json.loads(wire[0]["tool_calls"][0]["function"]["arguments"]) == sent


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("fine_1", "fine_1"),
        ("a b.c", "a_b_c"),
        ("", "invalid_call"),
        (None, "invalid_call"),
        ("x" * 99, "x" * 64),
    ],
)
def test_function_names_follow_the_protocol(name: Any, sent: str) -> None:
    wire = history({"role": "assistant", "content": "", "tool_calls": [call(name=name)]})
    assert wire[0]["tool_calls"][0]["function"]["name"] == sent


def test_a_name_that_was_offered_stays() -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [call(name="fs.read")]}
    wire = history(message, offered=("fs.read",))
    assert wire[0]["tool_calls"][0]["function"]["name"] == "fs.read"


def test_parts_of_a_user_message_stay_and_those_of_an_assistant_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    wire = history({"role": "user", "content": parts}, {"role": "assistant", "content": parts})
    assert wire == [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]


def test_the_input_is_not_changed() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(None, arguments="x")]}
    before = json.dumps(message)
    history(message)
    assert json.dumps(message) == before


def test_the_raw_call_is_what_is_executed() -> None:
    reply = read_reply(
        {"content": "", "tool_calls": [call(None, "f", '{"a": ')]},
        turn=3,
        used_ids=set(),
        offered=("f",),
    )
    assert reply.calls == [call("call_3_0", "f", '{"a": ')]
    assert reply.message["tool_calls"] == [call("call_3_0", "f", "{}")]
    assert reply.repaired


def test_what_is_no_message_becomes_one() -> None:
    reply = read_reply(7, turn=1, used_ids=set(), offered=())
    assert reply.message == {"role": "assistant", "content": "7"}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}",
        "x <function=f>",
        "[TOOL_CALLS] [",
        "<|python_tag|>f()",
        "<｜tool▁calls▁begin｜>",
    ],
)
def test_calls_left_as_text_are_recognised(text: str) -> None:
    assert looks_like_call(text)


@pytest.mark.parametrize("text", ["", None, "call me", "a tool call", "if a<b and c>d"])
def test_ordinary_text_is_no_call(text: Any) -> None:
    assert not looks_like_call(text)


def test_call_ids_without_a_proper_character_stay_apart() -> None:
    calls = [{"id": id, "function": {"name": "echo", "arguments": "{}"}} for id in "\ud800\ud801"]
    reply = read_reply({"tool_calls": calls}, turn=1, used_ids=set(), offered=["echo"])
    ids = [call["id"] for call in reply.wire["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(id.encode() for id in ids)
    assert [call["id"] for call in reply.calls] == ids


def test_an_answer_finds_its_call_by_an_id_without_a_proper_character() -> None:
    calls = [{"id": id, "function": {"name": "echo", "arguments": "{}"}} for id in ("a", "\ud800")]
    answers = [
        {"role": "tool", "tool_call_id": "\ud800", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]
    asked = {"role": "assistant", "tool_calls": calls}
    _, first, second = wire_history([asked, *answers], used_ids=set())
    assert (first["content"], second["content"]) == ("first", "second")
    assert second["tool_call_id"].encode()
