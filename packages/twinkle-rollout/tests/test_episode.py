"""What both rollouts decide alike, through the public interface of the one with an endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.protocol import API
from twinkle_agentic.protocol.errors import ApiErrorKind, ApiStatusError
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import ToolManager

CALL = {"id": "c", "type": "function", "function": {"name": "play", "arguments": "{}"}}
TOOL: Any = {"type": "function", "function": {"name": "play", "parameters": {"type": "object"}}}


class Scripted(API):
    """Answers with the given messages in turn, the last one again; keeps what it was sent."""

    def __init__(self, *messages: dict[str, Any], strict: bool = False) -> None:
        self.messages, self.sent, self.strict = list(messages), list[Any](), strict

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        self.sent.append([dict(message) for message in trajectory["messages"]])
        if self.strict and any("reasoning" in message for message in self.sent[-1]):
            raise ApiStatusError(
                "HTTP 400: unknown field", kind=ApiErrorKind.REFUSED, status=400, retryable=False
            )
        turn = sum(message["role"] == "assistant" for message in trajectory["messages"])
        message = self.messages[min(turn, len(self.messages) - 1)]
        return {"role": "assistant", "content": "", "finish_reason": "stop", **message}


class Game(Env):
    def __init__(self, *results: StepResult) -> None:
        self.results, self.replies = list(results), list[Any]()

    def tools(self) -> list[Any]:
        return [TOOL]

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return self.results.pop(0) if self.results else StepResult("ok", 1.0)


def roll(api: Any, env: Env | None = None, **options: Any) -> Any:
    rollout: Any = APIMultiTurnRollout(api, env_factory=lambda _: env or Game(), **options)
    (out,) = rollout([{"messages": [{"role": "user", "content": "Play."}]}])
    return out


@pytest.mark.parametrize("reason", ["aborted", "cancelled", "timeout", {"type": "abort"}])
def test_a_turn_with_an_unknown_finish_reason_is_not_executed(reason: Any) -> None:
    out = roll(Scripted({"tool_calls": [CALL], "finish_reason": reason}))
    assert (out["stop_reason"], out["error_kind"]) == ("api_error", "server_error")
    assert (out["reward"], out["step_rewards"], out["retryable"]) == (None, [], True)


def test_a_turn_without_a_finish_reason_fails_where_one_is_required() -> None:
    silent = Scripted({"tool_calls": [CALL], "finish_reason": None})
    out = roll(silent, finish_reason_required=True)
    assert (out["stop_reason"], out["error_kind"]) == ("api_error", "bad_reply")
    assert "finish_reason_required=False" in out["error"]
    assert roll(silent, finish_reason_required=False, max_turns=1)["step_rewards"] == [1.0]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_goes_back_in_the_field_it_came_in(field: str) -> None:
    api = Scripted({"tool_calls": [CALL], field: "think"}, {"content": "done"})
    out = roll(api)
    assert api.sent[1][1][field] == "think"
    assert out["messages"][1]["reasoning_content"] == "think"
    assert "reasoning_dropped" not in out


def test_reasoning_is_left_out_where_that_is_asked_for() -> None:
    api = Scripted({"tool_calls": [CALL], "reasoning": "think"}, {"content": "done"})
    roll(api, reasoning="drop")
    assert "reasoning" not in api.sent[1][1]


def test_a_strict_endpoint_is_asked_once_more_without_the_reasoning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turn = {"tool_calls": [CALL], "reasoning": "think"}
    api = Scripted(turn, turn, {"content": "done"}, strict=True)
    out = roll(api)
    assert (out["stop_reason"], out["error"], out["turns"]) == ("stop", None, 3)
    assert out["reasoning_dropped"] is True
    assert ["reasoning" in str(sent) for sent in api.sent] == [False, True, False, False]
    assert caplog.text.count("refuses the reasoning") == 1


def test_a_call_left_in_the_reasoning_is_flagged() -> None:
    out = roll(Scripted({"content": "hm", "reasoning": '<tool_call>{"name": "play"}</tool_call>'}))
    assert (out["stop_reason"], out["error_kind"]) == ("stop", "unparsed_tool_call")
    assert out["unparsed_tool_calls"] == 1


def test_an_empty_reply_whose_answer_is_in_the_reasoning_is_flagged() -> None:
    out = roll(Scripted({"content": "", "reasoning": "The answer is 4."}))
    assert (out["stop_reason"], out["error_kind"]) == ("stop", "empty_reply")


def test_an_env_that_truncates_is_told_from_one_that_terminates() -> None:
    cut = StepResult("out of time", 0.5, True, {"truncated": True})
    out = roll(Scripted({"tool_calls": [CALL]}), Game(StepResult("a", 0.5), cut))
    assert (out["stop_reason"], out["truncated"], out["reward"]) == ("env_truncated", True, 1.0)


def test_an_env_whose_episode_was_over_before_is_an_error() -> None:
    (tool,) = EnvTool.from_env(Game(StepResult("end", 1.0, True)))
    tool("play", {})
    rollout: Any = APIMultiTurnRollout(Scripted({"tool_calls": [CALL]}), ToolManager([tool]))
    (out,) = rollout([{"messages": [{"role": "user", "content": "Play."}]}])
    assert (out["stop_reason"], out["reward"], out["turns"]) == ("env_error", None, 0)
    assert "over before the rollout" in out["error"]


class Talking(Game):
    """Answers messages without a call: twice with a reward, then the episode is done."""

    def reply(self, message: Any) -> StepResult | None:
        self.replies.append(message["content"])
        return StepResult(f"heard {message['content']}", 0.25, done=len(self.replies) == 2)


def test_an_env_may_answer_a_message_without_a_call() -> None:
    env = Talking()
    api = Scripted({"content": "one"}, {"content": "two"})
    out = roll(api, env)
    assert (out["stop_reason"], out["turns"], env.replies) == ("env_done", 2, ["one", "two"])
    assert (out["step_rewards"], out["reward"]) == ([0.25, 0.25], 0.5)
    assert api.sent[1][-1] == {"role": "user", "content": "heard one"}


def test_a_reply_that_raises_failed_a_step_and_the_episode_goes_on() -> None:
    class Broken(Game):
        def reply(self, message: Any) -> StepResult | None:
            raise ValueError("no such word")

    api = Scripted({"content": "xyzzy"})
    out = roll(api, Broken(), max_turns=2)
    assert (out["stop_reason"], out["failed_steps"]) == ("max_turns", [0, 1])
    assert api.sent[1][-1]["content"] == "Error: ValueError: no such word"


def broken_calls(count: int) -> list[dict[str, Any]]:
    return [{"content": "<tool_call>{"}] * count


@pytest.mark.parametrize(
    ("messages", "options", "stop", "unparsed"),
    [
        ([*broken_calls(2), {"tool_calls": [CALL]}, {"content": "done"}], {}, ("stop", None), 2),
        (broken_calls(1), {"max_broken_calls": 2}, ("stop", "unparsed_tool_call"), 3),
        (broken_calls(1), {"on_broken_call": "end"}, ("stop", "unparsed_tool_call"), 1),
    ],
)
def test_a_broken_call_is_answered_a_few_times_in_a_row(
    messages: Any, options: Any, stop: Any, unparsed: int
) -> None:
    api = Scripted(*messages)
    given: Any = {"on_broken_call": "answer", "max_turns": 9, **options}
    out = roll(api, **given)
    assert ((out["stop_reason"], out["error_kind"]), out["unparsed_tool_calls"]) == (stop, unparsed)
    if len(api.sent) > 1:
        assert api.sent[1][-1]["role"] == "user"
        assert "could not be read" in api.sent[1][-1]["content"]


@pytest.mark.parametrize("make", [APIMultiTurnRollout])
def test_choices_are_checked(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="on_broken_call must be 'answer' or 'end'"):
        make(Scripted({}), ToolManager(), on_broken_call="retry")
    with pytest.raises(ValueError, match="reasoning must be 'keep' or 'drop'"):
        make(Scripted({}), ToolManager(), reasoning="hide")
