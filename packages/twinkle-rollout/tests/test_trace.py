from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import SandboxLostError
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout.trace import TraceWriter
from twinkle_agentic.tools import ToolManager


def rollout_of(*args: Any, **kwargs: Any) -> Any:
    return APIMultiTurnRollout(*args, **kwargs)


def prompts(count: int) -> Any:
    return [
        {
            "messages": [{"role": "user", "content": f"Hello {n}"}],
            "user_data": [("id", json.dumps("same/id")), ("ground_truth", json.dumps("7"))],
        }
        for n in range(count)
    ]


def test_each_trajectory_gets_a_file_of_its_own(
    api: Any, echo: ToolManager, tmp_path: Path
) -> None:
    rollout = rollout_of(api("tools:1"), echo, trace_dir=str(tmp_path / "traces"))
    outs: Any = rollout(prompts(5), global_step=3)
    files = sorted((tmp_path / "traces").iterdir())
    assert sorted(o["trace_path"] for o in outs) == [str(f) for f in files]
    assert len(files) == 5
    assert all(f.name.startswith("step000003-unscored-same_id-") for f in files)
    record = json.loads(Path(outs[2]["trace_path"]).read_text())
    assert record["trajectory"]["messages"] == outs[2]["messages"]
    assert (record["ground_truth"], record["stop_reason"], record["turns"]) == ("7", "stop", 2)


def test_a_second_rollout_never_overwrites_the_first(
    api: Any, echo: ToolManager, tmp_path: Path
) -> None:
    rollout = rollout_of(api("answer"), echo, trace_dir=tmp_path)
    for _ in range(2):
        rollout(prompts(2), global_step=3)
    assert len(list(tmp_path.iterdir())) == 4


def test_the_raw_reply_is_in_the_trace_alone(api: Any, echo: ToolManager, tmp_path: Path) -> None:
    (out,) = rollout_of(api("bad_arguments"), echo, trace_dir=tmp_path)(prompts(1))
    (file,) = tmp_path.iterdir()
    record = json.loads(file.read_text())
    raw = record["raw_replies"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert raw == '{"text": "cut'
    assert raw not in json.dumps(out["messages"])


def not_hello_1(trajectory: Any) -> bool:
    return trajectory["messages"][0]["content"] != "Hello 1"


def hello_2(trajectory: Any) -> bool:
    return trajectory["messages"][0]["content"] == "Hello 2"


def raises(trajectory: Any) -> bool:
    return trajectory["no such key"]


def test_callbacks_choose_the_files_and_their_names(
    api: Any, echo: ToolManager, tmp_path: Path
) -> None:
    rollout_of(
        api("answer"),
        echo,
        trace_dir=tmp_path,
        trace_callback=not_hello_1,
        success_callback=hello_2,
    )(prompts(3))
    assert sorted(f.name.split("-")[0] for f in tmp_path.iterdir()) == ["fail", "ok"]


class OneStep(Env):
    """Over after one step, which earns `reward`; without one, the step is not judged."""

    def __init__(self, reward: float | None, *, breaks: bool = False) -> None:
        self.reward, self.breaks = reward, breaks

    def reset(self, trajectory: Any = None) -> StepResult:
        return StepResult()

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        if self.breaks:
            raise SandboxLostError("gone")
        return StepResult.scored("seen", self.reward, done=True)

    def tools(self) -> list[Any]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [{"type": "function", "function": {"name": "echo", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("env", "word", "success"),
    [
        (OneStep(1.0), "ok", True),
        (OneStep(0.25), "ok", True),
        (OneStep(0.0), "fail", False),
        (OneStep(-1.0), "fail", False),
        (OneStep(1.0, breaks=True), "unscored", None),
    ],
)
def test_without_a_callback_the_reward_names_the_file(
    api: Any, tmp_path: Path, env: OneStep, word: str, success: bool
) -> None:
    def make(_: Any) -> Env:
        return env

    rollout_of(api("always"), env_factory=make, trace_dir=tmp_path)(prompts(1))
    (file,) = tmp_path.iterdir()
    assert file.name.split("-")[0] == word
    assert json.loads(file.read_text())["success"] is success


def test_what_nothing_judged_is_neither_a_success_nor_a_failure(
    api: Any, echo: ToolManager, tmp_path: Path
) -> None:
    rollout_of(api("answer"), echo, trace_dir=tmp_path)(prompts(1))
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("unscored-same_id-")
    assert json.loads(file.read_text())["success"] is None


def test_a_trajectory_that_earned_something_and_then_broke_is_no_success(tmp_path: Path) -> None:
    broken: dict[str, Any] = {"messages": [], "reward": 0.5, "error": "TimeoutError: no answer"}
    path, problem = TraceWriter(tmp_path).write(broken, position=0)
    assert (Path(str(path)).name.split("-")[0], problem) == ("fail", None)


def test_a_trace_that_cannot_be_written_is_reported(
    api: Any, echo: ToolManager, tmp_path: Path
) -> None:
    rollout = rollout_of(api("answer"), echo, trace_dir=tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    (out,) = rollout(prompts(1))
    assert (out["stop_reason"], out["trace_path"]) == ("stop", None)
    assert "FileNotFoundError" in out["trace_error"]


def test_a_callback_that_raises_is_reported(api: Any, echo: ToolManager, tmp_path: Path) -> None:
    rollout = rollout_of(api("answer"), echo, trace_dir=tmp_path, trace_callback=raises)
    (out,) = rollout(prompts(1))
    assert "KeyError" in out["trace_error"]
    assert list(tmp_path.iterdir()) == []


def test_values_json_does_not_know_are_written(api: Any, echo: ToolManager, tmp_path: Path) -> None:
    prompt: Any = {**prompts(1)[0], "extra": {1, 2}, "nan": float("nan"), "text": "\ud800"}
    rollout_of(api("answer"), echo, trace_dir=tmp_path)([prompt])
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["trajectory"]["nan"] == "NaN"
