"""Recorded trajectories, played again."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import SessionClosedError
from twinkle_agentic.protocol.base import API
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.replay import replay as replay_command
from twinkle_agentic.rollout.replay import Replay, ReplayStatus, areplay, replay, rescore


class Dice(Env):
    """Throw until the sum is 10 or more."""

    live = 0

    def __init__(self, *, seeded: bool = True, from_step: int = 0, bonus: float = 0.0) -> None:
        self.seeded, self.from_step, self.bonus = seeded, from_step, bonus
        type(self).live += 1
        self.closed = False

    def tools(self) -> list[Any]:
        parameters = {"type": "object", "properties": {"times": {"type": "integer"}}}
        return [{"type": "function", "function": {"name": "throw", "parameters": parameters}}]

    def reset(self, trajectory: Any = None) -> StepResult:
        self.dice = random.Random(trajectory["user_data"]["seed"])
        self.sum = self.thrown = 0
        return StepResult()

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        if not self.seeded and self.thrown >= self.from_step:
            self.dice = random.SystemRandom()  # pyright: ignore[reportAttributeAccessIssue]
        self.thrown += 1
        eyes = self.dice.randint(1, 10**6)
        self.sum += eyes % 6 + 1
        return StepResult(f"{eyes}", reward=eyes % 6 + 1.0, done=self.sum >= 10)

    def evaluate(self, trajectories: Sequence[Any], **kwargs: Any) -> list[float]:
        return [self.bonus]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            type(self).live -= 1


class Thrower(API):
    """Throws in every turn; now and then it calls a tool that is not there, or writes no JSON."""

    def __init__(self) -> None:
        self.turn = 0

    def __call__(self, trajectory: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        turn = sum(message["role"] == "assistant" for message in trajectory["messages"])
        name = "throw" if turn != 1 else "no_such_tool"
        arguments = json.dumps({"times": 1}) if turn != 2 else "{not json"
        call = {"id": f"c{turn}", "type": "function",
                "function": {"name": name, "arguments": arguments}}  # fmt: skip
        return {"role": "assistant", "content": "", "tool_calls": [call],
                "finish_reason": "tool_calls"}  # fmt: skip


def _record(count: int, make: Callable[[Any], Env] = lambda _: Dice()) -> list[Any]:
    rollout = APIMultiTurnRollout(Thrower(), env_factory=make, max_turns=12)
    message = {"role": "user", "content": "Throw."}
    tasks = [
        {"id": f"t{seed}", "messages": [message], "user_data": {"seed": seed}}
        for seed in range(count)
    ]
    finished = rollout(tasks)
    assert {one["stop_reason"] for one in finished} == {"env_done"}
    return json.loads(json.dumps(finished))  # as they come from a file


@pytest.fixture(autouse=True)
def _all_closed() -> Any:  # pyright: ignore[reportUnusedFunction]
    yield
    assert Dice.live == 0


def test_a_reproducible_env_comes_out_the_same() -> None:
    records = _record(20)
    done: list[Replay] = []
    results = replay(records, lambda _: Dice(), concurrency=7, on_done=done.append)
    assert {result.status for result in results} == {ReplayStatus.SAME}
    assert [result.id for result in results] == [f"t{seed}" for seed in range(20)]
    assert [result.reward for result in results] == [one["reward"] for one in records]
    assert [result.steps for result in results] == [len(one["step_rewards"]) for one in records]
    assert len(done) == 20


@pytest.mark.parametrize("step", [0, 1])
def test_an_unseeded_die_is_found_at_its_step(step: int) -> None:
    # At least two steps: the sum is below 10 after one.
    records = [one for one in _record(8) if len(one["step_rewards"]) > 1]
    for result in replay(records, lambda _: Dice(seeded=False, from_step=step)):
        assert result.status is ReplayStatus.DIFFERENT
        assert result.difference is not None
        assert (result.difference.step, result.difference.field) == (step, "observation")
        # The second step comes after a call of no tool and one that is no JSON.
        assert result.difference.turn == (1 if step == 0 else 4)
        assert result.difference.recorded != result.difference.found


def test_another_score_is_a_difference() -> None:
    records = _record(2)
    for one in replay(records, lambda _: Dice(bonus=1.0)):
        assert one.difference is not None
        assert (one.difference.field, one.difference.found) == ("eval_reward", "1.0")
    assert "eval_reward was 0.0, is 1.0" in str(
        replay(records, lambda _: Dice(bonus=1.0))[0].difference
    )


def test_another_reward_or_end_is_a_difference() -> None:
    (record,) = _record(1)
    changed = json.loads(json.dumps(record))
    changed["step_rewards"][0] += 0.5
    (result,) = replay([changed], lambda _: Dice())
    assert result.difference is not None
    assert (result.difference.field, result.difference.step) == ("reward", 0)
    record["stop_reason"] = "max_turns"
    (result,) = replay([record], lambda _: Dice())
    assert result.difference is not None
    assert result.difference.field == "done"


def test_what_the_infrastructure_ended_is_skipped() -> None:
    (record,) = _record(1)
    lost = {**record, "reward": None, "stop_reason": "env_error", "error": "session lost"}
    (result,) = replay([lost], lambda _: Dice())
    assert (result.status, result.error) == (ReplayStatus.SKIPPED, "session lost")


def test_a_failure_of_the_replay_is_no_difference() -> None:
    class Lost(Dice):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            raise SessionClosedError("the server went away")

    records = _record(3)
    broken = iter([True, False, True])
    lock = threading.Lock()

    def make(_: Any) -> Env:
        with lock:
            return Lost() if next(broken) else Dice()

    results = replay(records, make, concurrency=1)
    assert [result.status.value for result in results] == ["failed", "same", "failed"]
    assert "the server went away" in str(results[0].error)


def test_a_factory_that_raises_and_a_reset_that_hangs_fail_alone() -> None:
    class Hanging(Dice):
        async def areset(self, trajectory: Any = None) -> StepResult:
            await asyncio.Event().wait()
            return StepResult()

    def make(trajectory: Any) -> Env:
        if trajectory["id"] == "t0":
            raise RuntimeError("no such env")
        return Hanging() if trajectory["id"] == "t1" else Dice()

    results = replay(_record(3), make, reset_timeout_s=0.3)
    assert [result.status.value for result in results] == ["failed", "failed", "same"]
    assert "no such env" in str(results[0].error)
    assert "TimeoutError" in str(results[1].error)


def test_a_cancelled_replay_closes_its_envs() -> None:
    async def play() -> None:
        started = asyncio.Event()

        class Slow(Dice):
            async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
                started.set()
                await asyncio.Event().wait()
                return StepResult()

        task = asyncio.create_task(areplay(records, lambda _: Slow()))
        await asyncio.wait_for(started.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    records = _record(3)
    asyncio.run(play())


def test_rescore_runs_evaluate_alone() -> None:
    class Words(Dice):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            raise AssertionError("rescore plays no step")

        def evaluate(self, trajectories: Sequence[Any], **kwargs: Any) -> list[float]:
            return [float(len(one["messages"])) for one in trajectories]

    records = _record(2, lambda _: Dice())
    results = rescore(records, lambda _: Words())
    assert [one.status.value for one in results] == ["different", "different"]
    for record in records:
        record["eval_reward"] = float(len(record["messages"]))
    results = rescore(records, lambda _: Words())
    assert [one.status.value for one in results] == ["same", "same"]
    assert results[0].reward == sum(records[0]["step_rewards"]) + len(records[0]["messages"])


def test_an_env_that_answers_in_text_is_replayed_too() -> None:
    class Chat(Dice):
        def reply(self, message: Any) -> StepResult:
            return self.step("throw", {})

    class Speaker(API):
        def __call__(self, trajectory: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
            return {"role": "assistant", "content": "Again!", "finish_reason": "stop"}

    rollout = APIMultiTurnRollout(Speaker(), env_factory=lambda _: Chat(), max_turns=12)
    message = {"role": "user", "content": "Throw."}
    (one,) = rollout([{"messages": [message], "user_data": {"seed": 3}}])
    record = json.loads(json.dumps(one))
    assert record["stop_reason"] == "env_done"
    (same,) = replay([record], lambda _: Chat())
    assert (same.status, same.steps) == (ReplayStatus.SAME, len(record["step_rewards"]))
    (other,) = replay([record], lambda _: Chat(seeded=False, from_step=1))
    assert other.difference is not None
    assert (other.difference.step, other.difference.turn) == (1, 2)


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="concurrency"):
        replay([], lambda _: Dice(), concurrency=0)
    with pytest.raises(ValueError, match="step_timeout_s"):
        replay([], lambda _: Dice(), step_timeout_s=-1)


def test_the_command_says_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_dice.py").write_text(
        "import random\n"
        "from twinkle_agentic.envs.base import Env, StepResult\n"
        "class Fair(Env):\n"
        "    def step(self, tool_name, arguments):\n"
        "        return StepResult('5', reward=5.0, done=True)\n"
        "class Loaded(Env):\n"
        "    def step(self, tool_name, arguments):\n"
        "        return StepResult('6', reward=6.0, done=True)\n"
    )
    call = {"id": "c", "type": "function", "function": {"name": "env_action", "arguments": "{}"}}
    row = {
        "id": "only",
        "messages": [
            {"role": "user", "content": "Throw."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "reward": 5.0,
        "step_rewards": [5.0],
        "stop_reason": "env_done",
    }
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(row) + "\n")

    def played(env: str, *ids: str) -> tuple[int, str]:
        console = Console(record=True, width=120, emoji=False)
        code = replay_command(console, run=tmp_path, env=env, ids=list(ids), step_timeout_s=10)
        return code, console.export_text().strip()

    assert played("my_dice:Fair") == (0, "1 same, 0 different, 0 failed, 0 skipped")
    code, text = played("my_dice:Loaded")
    assert code == 1
    assert "only: turn 1, step 0: observation was '5', is '6'" in text
    with pytest.raises(RefusedError, match="has no trajectory other"):
        played("my_dice:Fair", "other")
