from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout.export import training_trace, write_jsonl
from twinkle_agentic.tools import ToolManager

BODY = {"return_token_ids": True, "logprobs": True}


def roll(api: Any) -> Any:
    prompt: Any = {"messages": [{"role": "user", "content": "x"}]}
    return APIMultiTurnRollout(api, ToolManager(), extra_body=BODY)([prompt])[0]


def test_a_trajectory_becomes_a_training_trace(api: Any) -> None:
    trace = training_trace(roll(api("tokens")), trajectory_id="run-1")
    assert trace["schema_version"] == 1
    (turn,) = trace["turns"]
    assert (turn["node_id"], turn["loss_mask"]) == ("run-1/1", [0, 0, 0, 1, 1])
    assert (turn["completion_token_ids"], turn["per_token_logps"]) == ([7, 8], [-0.5, -0.25])


@pytest.mark.parametrize("model", ["tokens:short", "tokens:missing"])
def test_a_turn_that_must_not_be_trained_on_is_named(api: Any, model: str) -> None:
    with pytest.raises(ValueError, match="turn 1 must not be trained on"):
        training_trace(roll(api(model)), trajectory_id="run-1")


def test_no_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="return_token_ids"):
        training_trace({"messages": []}, trajectory_id="run-1")


def test_json_lines_hold_one_trajectory_each(api: Any, tmp_path: Path) -> None:
    out = roll(api("answer"))
    path = write_jsonl(tmp_path / "out.jsonl", [out, {**out, "extra": float("nan"), "t": "\ud800"}])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["stop_reason"] for line in lines] == ["stop", "stop"]
    assert lines[1]["extra"] == "NaN"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "out.jsonl", [{"a": 1}])

    def broken() -> Any:
        yield {"a": 2}
        raise RuntimeError("source failed")

    with pytest.raises(RuntimeError, match="source failed"):
        write_jsonl(path, broken())
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]
