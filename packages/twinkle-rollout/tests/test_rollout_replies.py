"""What a model or its server may answer, and what becomes of the trajectory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twinkle_agentic.rollout import APIMultiTurnRollout, StopReason
from twinkle_agentic.tools import ToolManager


def rollout_of(*args: Any, **kwargs: Any) -> Any:
    return APIMultiTurnRollout(*args, **kwargs)


def prompts(text: str = "Hello") -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": text}]}]


def roll(api: Any, manager: Any, **kwargs: Any) -> dict[str, Any]:
    (out,) = rollout_of(api, manager, **kwargs)(prompts(text=f"{api.model} "))
    return out


def test_tool_results_go_back_to_the_model(api: Any, echo: ToolManager) -> None:
    out = roll(api("tools:2"), echo)
    assert (out["stop_reason"], out["turns"], out["truncated"]) == ("stop", 3, False)
    assert [m["role"] for m in out["messages"]] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert out["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "echo hi"}
    assert out["usage"] == {"prompt_tokens": 30, "completion_tokens": 15, "total_tokens": 45}
    assert (out["error"], out["error_kind"], out["retryable"]) == (None, None, False)


def test_tools_of_the_trajectory_override_the_managers(api: Any, echo: ToolManager) -> None:
    tools: Any = [{"type": "function", "function": {"name": "other", "parameters": {}}}]
    rollout = rollout_of(api("body"), echo)
    (out,) = rollout([{**prompts()[0], "tools": tools}])
    assert json.loads(out["messages"][-1]["content"])["tools"] == tools


def test_a_manager_without_tools_sends_none(api: Any) -> None:
    out = roll(api("body"), ToolManager())
    assert "tools" not in json.loads(out["messages"][-1]["content"])


@pytest.mark.parametrize("model", ["null_ids", "same_ids"])
def test_call_ids_are_made_unique(api: Any, echo: ToolManager, model: str) -> None:
    out = roll(api(model), echo)  # the endpoint refuses a history with such ids
    ids = [c["id"] for m in out["messages"] for c in m.get("tool_calls", ())]
    assert (out["stop_reason"], len(ids), len(set(ids))) == ("stop", 4, 4)
    assert [m["tool_call_id"] for m in out["messages"] if m["role"] == "tool"] == ids


def test_bad_arguments_are_answered_and_do_not_poison_the_history(
    api: Any, echo: ToolManager
) -> None:
    out = roll(api("bad_arguments"), echo)
    assert (out["stop_reason"], out["tool_errors"]) == ("stop", {"invalid_arguments": 3})
    answers = [m["content"] for m in out["messages"] if m["role"] == "tool"]
    assert [a.startswith("Error: ") for a in answers] == [True, True, False, True, False]
    assert answers[4] == "echo twice"


def test_calls_that_are_no_calls_are_answered(api: Any, echo: ToolManager) -> None:
    out = roll(api("bad_calls"), echo)
    assert out["stop_reason"] == "stop"
    assert out["tool_errors"] == {"bad_call": 4, "unknown_tool": 1}
    assert sum(m["role"] == "tool" for m in out["messages"]) == 5


def test_finish_reason_stop_with_calls_runs_them(api: Any, echo: ToolManager) -> None:
    out = roll(api("lying_stop"), echo)
    assert (out["stop_reason"], out["turns"]) == ("stop", 2)


def test_finish_reason_tool_calls_without_calls_ends(api: Any, echo: ToolManager) -> None:
    out = roll(api("empty_calls"), echo)
    assert (out["stop_reason"], out["turns"]) == ("stop", 1)
    assert "tool_calls" not in out["messages"][-1]


def test_nothing_of_a_cut_turn_is_executed(api: Any, echo: ToolManager) -> None:
    out = roll(api("cut_call"), echo)
    assert (out["stop_reason"], out["truncated"], out["tool_errors"]) == ("length", True, {})
    assert out["messages"][-1] == {
        "role": "assistant",
        "content": "I will",
        "finish_reason": "length",
    }


def test_a_turn_the_content_filter_cut_is_flagged_and_runs_nothing(
    api: Any, echo: ToolManager
) -> None:
    out = roll(api("filtered"), echo)
    assert (out["stop_reason"], out["error_kind"]) == ("stop", "content_filter")
    assert (out["tool_errors"], "tool_calls" in out["messages"][-1]) == ({}, False)


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
def test_a_turn_the_server_gave_up_is_an_api_error(
    api: Any, echo: ToolManager, reason: str
) -> None:
    out = roll(api(f"gives_up:{reason}"), echo)
    assert (out["stop_reason"], out["retryable"], out["reward"]) == ("api_error", True, None)
    assert reason in out["error"]
    assert out["tool_errors"] == {}  # nothing of it was executed


def test_a_call_left_as_text_is_flagged(api: Any, echo: ToolManager) -> None:
    out = roll(api("as_text"), echo)
    assert (out["unparsed_tool_calls"], out["error_kind"]) == (1, "unparsed_tool_call")
    assert "parser" in out["error"]


def test_markup_without_tools_is_only_text(api: Any) -> None:
    out = roll(api("as_text"), ToolManager())
    assert (out["unparsed_tool_calls"], out["stop_reason"], out["error"]) == (0, "stop", None)


def test_fields_of_the_server_never_go_back(api: Any, echo: ToolManager) -> None:
    out = roll(api("extras"), echo)
    assert (out["stop_reason"], out["turns"]) == ("stop", 2)
    assert out["messages"][1]["reasoning_content"] == "hm"
    assert set(out["messages"][1]["tool_calls"][0]) == {"id", "type", "function"}


def test_lone_surrogates_never_go_back(api: Any, echo: ToolManager) -> None:
    assert roll(api("surrogate"), echo)["stop_reason"] == "stop"


def test_a_prompt_beyond_the_context_is_length(api: Any, echo: ToolManager) -> None:
    out = roll(api("context"), echo)
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("length", True, 1)
    assert out["error_kind"] == "context_length"
    assert out["messages"][-1]["role"] == "tool"  # what there was is kept


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("status:500", "server_error", "code 500 from the provider"),
        ("status:404", "refused", "code 404"),
        ("no_choices:list", "bad_reply", "moderated"),
        ("no_choices:null", "bad_reply", "moderated"),
        ("error_200", "server_error", "upstream exploded"),
        ("html", "bad_reply", "login"),
        ("truncated", "connection", "request to"),
        ("retry_after:99", "rate_limited", "slow down"),
    ],
)
def test_a_failing_endpoint_is_an_api_error_without_reward(
    api: Any, echo: ToolManager, model: str, kind: str, words: str
) -> None:
    out = roll(api(model, client_kwargs={"timeout": 5}), echo)
    assert (out["stop_reason"], out["error_kind"]) == ("api_error", kind)
    assert words in out["error"]
    assert (out["reward"], out["truncated"], out["turns"]) == (None, True, 0)


def test_flaky_endpoint_is_retried_in_place(api: Any, echo: ToolManager) -> None:
    assert roll(api("flaky:503"), echo)["messages"][-1]["content"] == "at last"


def test_unanswered_calls_at_the_turn_limit_are_answered_as_not_executed(
    api: Any, echo: ToolManager
) -> None:
    out = roll(api("always"), echo, max_turns=2)
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("max_turns", True, 2)
    assert [m["content"] for m in out["messages"] if m["role"] == "tool"] == [
        "echo hi",
        "Error: not executed: the turn limit was reached.",
    ]


def test_a_trajectory_at_the_turn_limit_can_be_continued(api: Any, echo: ToolManager) -> None:
    first = roll(api("tools:3"), echo, max_turns=2)
    (second,) = rollout_of(api("tools:3"), echo)([first])
    assert first["stop_reason"] == "max_turns"
    assert (second["stop_reason"], second["turns"]) == ("stop", 2)


def test_the_last_calls_can_be_executed(api: Any, echo: ToolManager) -> None:
    out = roll(api("always"), echo, max_turns=1, execute_final_calls=True)
    assert out["messages"][-1]["content"] == "echo hi"
    assert out["stop_reason"] == "max_turns"


def test_trajectory_tokens_are_bounded_by_the_servers_count(api: Any, echo: ToolManager) -> None:
    out = roll(api("always"), echo, max_turns=9, max_trajectory_tokens=15)
    assert (out["stop_reason"], out["turns"]) == ("length", 1)
    assert out["messages"][-1]["content"].startswith("Error: not executed")


def test_a_token_limit_nobody_can_count_is_an_error(api: Any, echo: ToolManager) -> None:
    out = roll(api("no_usage"), echo, max_trajectory_tokens=15)
    assert (out["stop_reason"], out["usage"]) == ("api_error", None)
    assert "usage" in out["error"]


def test_tokens_and_logprobs_are_kept_per_turn(api: Any) -> None:
    body = {"return_token_ids": True, "logprobs": True}
    out = roll(api("tokens"), ToolManager(), extra_body=body)
    assert out["token_turns"] == [
        {
            "turn": 1,
            "prompt_token_ids": [1, 2, 3],
            "token_ids": [7, 8],
            "logprobs": [-0.5, -0.25],
            "problem": None,
        }
    ]


@pytest.mark.parametrize(
    ("model", "problem"),
    [("tokens:short", "2 token ids, but 1 log"), ("tokens:missing", "sent none")],
)
def test_tokens_that_do_not_fit_are_flagged(api: Any, model: str, problem: str) -> None:
    body = {"return_token_ids": True, "logprobs": True}
    out = roll(api(model), ToolManager(), extra_body=body)
    assert problem in out["token_turns"][0]["problem"]


def test_stop_reasons_are_plain_strings(api: Any, echo: ToolManager) -> None:
    assert type(roll(api("answer"), echo)["stop_reason"]) is str
    assert {reason.value for reason in StopReason} == {
        *("stop", "length", "max_turns", "env_done", "env_truncated", "deadline"),
        *("api_error", "env_error"),
    }
