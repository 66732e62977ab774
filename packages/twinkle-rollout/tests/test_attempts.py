"""Episodes that a passing failure ended are played again, and no others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import CapacityError, EnvError, SandboxLostError
from twinkle_agentic.rollout import APIMultiTurnRollout, RetryPolicy
from twinkle_agentic.tools import ToolManager

LOST = StepResult.failed(SandboxLostError("the sandbox is gone"))
TOOL: Any = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}


class Shaky(Env):
    """Its first attempts end as told, by position; further ones earn 1.0."""

    def __init__(self, book: Book, name: str) -> None:
        self.book, self.name = book, name

    def reset(self, trajectory: Any = None) -> StepResult:
        self.book.resets[self.name] += 1
        self.number = self.book.resets[self.name]
        if self.book.at_reset and (error := self._told()) is not None:
            raise error
        return StepResult("ready")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        if not self.book.at_reset and (told := self._told()) is not None:
            if isinstance(told, BaseException):
                raise told
            return told
        return StepResult("done", 1.0, True)

    def _told(self) -> Any:
        told = self.book.failures.get(self.name, [])
        return told[self.number - 1] if self.number <= len(told) else None

    def tools(self) -> list[Any]:
        return [TOOL]

    def close(self) -> None:
        with self.book.lock:
            self.book.closes[self.name] += 1


class Book:
    """What is to fail in which trajectory, and what was done."""

    def __init__(self, failures: Mapping[str, list[Any]], *, at_reset: bool = False) -> None:
        self.failures, self.at_reset = failures, at_reset
        self.lock = threading.Lock()
        self.resets: Counter[str] = Counter()
        self.closes: Counter[str] = Counter()

    def factory(self, trajectory: Any) -> Env:
        return Shaky(self, trajectory["name"])


def roll(
    api: Any, book: Book, *names: str, pause_s: float = 0.001, **options: Any
) -> list[dict[str, Any]]:
    if "max_attempts" in options:
        options["retry"] = RetryPolicy(
            max_attempts=options.pop("max_attempts"), base_delay_s=pause_s
        )
    given: Any = [{"name": n, "messages": [{"role": "user", "content": "Play."}]} for n in names]
    rollout: Any = APIMultiTurnRollout(api, env_factory=book.factory, **options)
    return rollout(given)


def test_a_lost_episode_is_played_again_from_its_prompt(api: Any) -> None:
    book = Book({"bad": [LOST, LOST]})
    told: list[Any] = []
    fine, bad = roll(
        api("always"),
        book,
        "fine",
        "bad",
        max_attempts=3,
        on_done=told.append,
    )
    assert (fine["reward"], fine["attempts"], fine["earlier_errors"]) == (1.0, 1, [])
    assert (bad["reward"], bad["attempts"], bad["error"]) == (1.0, 3, None)
    assert len(bad["earlier_errors"]) == 2
    assert all("the sandbox is gone" in error for error in bad["earlier_errors"])
    roles = [message["role"] for message in bad["messages"]]
    assert roles == ["user", "assistant", "tool"]
    assert (bad["turns"], bad["step_rewards"]) == (1, [1.0])
    assert bad["timing"]["earlier"] > 0
    assert book.resets == book.closes == {"fine": 1, "bad": 3}
    assert sorted(out["name"] for out in told) == ["bad", "fine"]


def test_attempts_end_with_the_last_failure(api: Any) -> None:
    book = Book({"bad": [LOST] * 9})
    (bad,) = roll(api("always"), book, "bad", max_attempts=2)
    assert (bad["reward"], bad["stop_reason"], bad["attempts"]) == (None, "env_error", 2)
    assert (bad["retryable"], len(bad["earlier_errors"])) == (True, 1)
    assert book.resets == book.closes == {"bad": 2}


def test_a_reset_that_finds_no_room_is_tried_again(api: Any) -> None:
    book = Book({"late": [CapacityError("full", retryable=True)]}, at_reset=True)
    (late,) = roll(api("always"), book, "late", max_attempts=2)
    assert (late["reward"], late["attempts"]) == (1.0, 2)


@pytest.mark.parametrize("failure", [EnvError("a fault of the env"), StepResult("", -1.0, True)])
def test_what_would_fail_again_or_has_a_reward_is_played_once(api: Any, failure: Any) -> None:
    book = Book({"one": [failure]})
    (out,) = roll(api("always"), book, "one", max_attempts=3)
    assert (out["attempts"], book.resets["one"]) == (1, 1)
    assert out["reward"] == (-1.0 if isinstance(failure, StepResult) else None)


def test_a_refusal_of_the_endpoint_is_final_and_its_failure_is_not(api: Any) -> None:
    (refused,) = roll(api("status:400"), Book({}), "one", max_attempts=3)
    assert (refused["stop_reason"], refused["attempts"]) == ("api_error", 1)
    (failed,) = roll(api("gives_up:abort"), Book({}), "one", max_attempts=3)
    assert (failed["stop_reason"], failed["attempts"]) == ("api_error", 3)


def test_the_deadline_holds_for_all_attempts_together(api: Any) -> None:
    book = Book({"bad": [LOST] * 1_000})
    started = time.monotonic()
    (bad,) = roll(api("always"), book, "bad", max_attempts=1_000, deadline_s=1.0, pause_s=0.2)
    assert time.monotonic() - started < 30
    assert bad["reward"] is None
    assert 1 < bad["attempts"] < 1_000


def test_a_cancelled_pause_ends_at_once_with_every_env_closed(api: Any) -> None:
    retry = RetryPolicy(max_attempts=2, base_delay_s=600.0, max_delay_s=600.0)
    book = Book({"bad": [LOST]})

    async def cancelled() -> None:
        rollout: Any = APIMultiTurnRollout(api("always"), env_factory=book.factory, retry=retry)
        given = [{"name": "bad", "messages": [{"role": "user", "content": "Play."}]}]
        task = asyncio.ensure_future(rollout.arun(given))
        while not book.closes["bad"]:  # noqa: ASYNC110 # the env closes in a thread
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    asyncio.run(cancelled())
    assert book.resets == book.closes == {"bad": 1}


def test_one_trace_is_written_and_tells_of_all_attempts(api: Any, tmp_path: Path) -> None:
    book = Book({"bad": [LOST]})
    (bad,) = roll(api("always"), book, "bad", max_attempts=2, trace_dir=tmp_path)
    (trace,) = tmp_path.iterdir()
    assert str(trace) == bad["trace_path"]
    assert '"attempts": 2' in trace.read_text()


def test_without_attempts_there_are_no_fields_of_them(api: Any) -> None:
    (out,) = roll(api("always"), Book({}), "one")
    assert not {"attempts", "earlier_errors"} & set(out)
    assert "earlier" not in out["timing"]


def test_attempts_need_a_factory_and_a_count(api: Any) -> None:
    make: Any = APIMultiTurnRollout
    with pytest.raises(ValueError, match="max_attempts=2 needs env_factory"):
        make(api("answer"), ToolManager(), max_attempts=2)
    with pytest.raises(ValueError, match="max_attempts"):
        make(api("answer"), env_factory=Book({}).factory, max_attempts=0)
    rollout = make(api("answer"), env_factory=Book({}).factory, max_attempts=2)
    with pytest.raises(ValueError, match="max_attempts=2 needs env_factory"):
        rollout([{"messages": []}], tool_manager=ToolManager())
