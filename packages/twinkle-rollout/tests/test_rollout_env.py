"""One env per trajectory: made, reset, stepped, scored, closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import CapacityError, EnvError, SandboxLostError
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import ToolManager


def always(value: Any) -> Any:
    """Make a function that gives a value whatever it is asked."""

    def same(*_: Any, **__: Any) -> Any:
        return value

    return same


def rollout_of(*args: Any, **kwargs: Any) -> Any:
    return APIMultiTurnRollout(*args, **kwargs)


class Game(Env):
    """Done after `length` steps, each worth `step_reward`; keeps a log of what was done to it."""

    def __init__(self, length: int = 2, step_reward: Any = 0.5, **behaviour: Any) -> None:
        self.length, self.step_reward, self.behaviour = length, step_reward, behaviour
        self.log: list[str] = []
        self.steps = 0

    def reset(self, trajectory: Any = None) -> StepResult:
        self.log.append("reset")
        self.trajectory = trajectory
        if "reset_raises" in self.behaviour:
            raise self.behaviour["reset_raises"]
        return self.behaviour.get("reset_result", StepResult())

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        self.log.append("step")
        self.steps += 1
        if (result := self.behaviour.get("results", {}).get(self.steps)) is not None:
            if isinstance(result, BaseException):
                raise result
            return result
        return StepResult(f"after {self.steps}", self.step_reward, self.steps >= self.length)

    def tools(self) -> list[Any]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [{"type": "function", "function": {"name": "echo", "parameters": parameters}}]

    def close(self) -> None:
        self.log.append("close")
        if "close_raises" in self.behaviour:
            raise self.behaviour["close_raises"]


class FaultyError(Exception):
    pass


class Faulty(Game):
    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        raise FaultyError("no score")


def fail_to_make(_: object) -> Env:
    raise FaultyError("no licence")


class ScoredGame(Game):
    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        self.log.append("evaluate")
        self.scored = trajectories
        score = self.behaviour.get("score", [10.0])
        if isinstance(score, BaseException):
            raise score
        return score


def roll(api: Any, env: Any, **kwargs: Any) -> dict[str, Any]:
    prompt: Any = {"messages": [{"role": "user", "content": "Play."}], "user_data": {"seed": 3}}
    (out,) = rollout_of(api, env_factory=always(env), **kwargs)([prompt])
    return out


def test_the_episode_ends_when_the_env_is_done(api: Any) -> None:
    env = Game(length=2)
    out = roll(api("always"), env)
    assert (out["stop_reason"], out["truncated"], out["turns"]) == ("env_done", False, 2)
    assert (out["reward"], out["step_rewards"], out["eval_reward"]) == (1.0, [0.5, 0.5], None)
    assert env.log == ["reset", "step", "step", "close"]
    assert out["messages"][-1]["content"] == "after 2"


def test_reset_receives_the_trajectory(api: Any) -> None:
    env = Game()
    roll(api("always"), env)
    assert env.trajectory["user_data"] == {"seed": 3}


def test_reward_is_the_steps_together_with_evaluate(api: Any) -> None:
    env = ScoredGame(length=2)
    out = roll(api("always"), env)
    assert (out["reward"], out["eval_reward"]) == (11.0, 10.0)
    assert env.log[-2:] == ["evaluate", "close"]
    assert env.scored[0]["messages"] == out["messages"]


def test_no_step_after_done_and_every_call_is_answered(api: Any) -> None:
    env = Game(length=2)
    out = roll(api("parallel"), env)
    assert (out["stop_reason"], env.steps) == ("env_done", 2)
    answers = [m["content"] for m in out["messages"] if m["role"] == "tool"]
    assert answers == ["after 1", "after 2", "Error: not executed: the episode is over."]


def test_steps_of_the_last_turn_count(api: Any) -> None:
    out = roll(api("always"), Game(length=9), max_turns=2)
    assert (out["stop_reason"], out["step_rewards"], out["reward"]) == (
        "max_turns",
        [0.5, 0.5],
        1.0,
    )
    assert out["messages"][-1]["content"] == "after 2"


def test_done_on_the_last_turn_is_env_done(api: Any) -> None:
    assert roll(api("always"), Game(length=2), max_turns=2)["stop_reason"] == "env_done"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("append", [{"role": "user", "content": "Play.\n\nYour hand: 20"}]),
        (
            "message",
            [{"role": "user", "content": "Play."}, {"role": "user", "content": "Your hand: 20"}],
        ),
        ("ignore", [{"role": "user", "content": "Play."}]),
    ],
)
def test_the_first_observation_reaches_the_model(api: Any, where: Any, expected: Any) -> None:
    env = Game(reset_result=StepResult("Your hand: 20"))
    out = roll(api("answer"), env, reset_observation=where)
    assert out["messages"][:-1] == expected


def test_reset_that_says_done_asks_no_model(api: Any) -> None:
    env = ScoredGame(reset_result=StepResult("over", done=True))
    out = roll(api("always"), env)
    assert (out["stop_reason"], out["turns"], out["reward"]) == ("env_done", 0, None)
    assert env.log == ["reset", "close"]


@pytest.mark.parametrize(
    ("behaviour", "kind", "retryable"),
    [
        ({"reset_raises": CapacityError("full")}, "capacity", True),
        ({"reset_raises": RuntimeError("boom")}, "env", False),
        ({"reset_raises": SystemExit(3)}, "env", False),
        (
            {"reset_result": StepResult.failed("gone", kind="session_lost", retryable=True)},
            "session_lost",
            True,
        ),
        ({"results": {2: SandboxLostError("vanished")}}, "sandbox_lost", True),
        ({"results": {2: EnvError("bug")}}, "env", False),
        (
            {"results": {2: StepResult.failed("lost", kind="session_lost", retryable=True)}},
            "session_lost",
            True,
        ),
    ],
)
def test_a_lost_episode_is_an_env_error_without_reward(
    api: Any, behaviour: Any, kind: str, retryable: bool
) -> None:
    env = ScoredGame(length=9, **behaviour)
    out = roll(api("always"), env)
    assert (out["stop_reason"], out["error_kind"], out["retryable"]) == (
        "env_error",
        kind,
        retryable,
    )
    assert (out["reward"], out["truncated"]) == (None, True)
    assert out["error"]
    assert env.log[-1] == "close"
    assert "evaluate" not in env.log


def test_a_failed_step_of_a_living_episode_counts_nothing(api: Any) -> None:
    failed = StepResult("Error: try again", 99.0, False, {"error": "bad", "error_kind": "tool"})
    out = roll(api("always"), Game(length=3, results={2: failed}))
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)
    assert (out["step_rewards"], out["failed_steps"]) == ([0.5, 0.0, 0.5], [1])
    assert out["tool_errors"] == {"tool": 1}


def test_rewards_that_are_missing_or_no_numbers_are_flagged(api: Any) -> None:
    results = {1: StepResult.scored("a", None), 2: StepResult("b", float("nan"))}
    out = roll(api("always"), Game(length=3, results=results))
    assert (out["reward"], out["step_rewards"]) == (0.5, [0.0, 0.0, 0.5])
    assert (out["reward_missing_steps"], out["failed_steps"]) == ([0], [1])


class Silent(Game):
    """Gives no reward for its steps, as a sandbox."""

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        result = super().step(tool_name, arguments)
        return StepResult.scored(result.observation, None, done=result.done)


class SilentScored(Silent):
    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [0.75]


class Graded(Silent):
    """Sets the reward of each step on what its base class returned: none for the first."""

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        result = super().step(tool_name, arguments)
        result.reward = 0.0 if self.steps == 1 else 1.0
        return result


def test_steps_of_an_env_that_gives_no_reward_are_seen(api: Any) -> None:
    out = roll(api("always"), Silent(length=2))
    assert (out["reward"], out["reward_missing_steps"]) == (0.0, [0, 1])


def test_evaluate_alone_is_the_reward_of_an_env_whose_steps_give_none(api: Any) -> None:
    out = roll(api("always"), SilentScored(length=2))
    assert (out["reward"], out["eval_reward"]) == (0.75, 0.75)
    assert (out["step_rewards"], out["reward_missing_steps"]) == ([0.0, 0.0], [0, 1])


def test_a_reward_that_a_subclass_sets_is_one(api: Any) -> None:
    out = roll(api("always"), Graded(length=2))
    assert (out["reward"], out["step_rewards"]) == (1.0, [0.0, 1.0])
    assert out["reward_missing_steps"] == []


def test_a_reward_is_counted_whatever_stands_beside_it(api: Any) -> None:
    odd = StepResult("seen", 2.0, False, {"reward_missing": True})
    out = roll(api("always"), Game(length=2, results={1: odd}))
    assert (out["step_rewards"], out["reward_missing_steps"]) == ([2.0, 0.5], [])


@pytest.mark.parametrize(
    "score", [[], [1.0, 2.0], [float("nan")], ["x"], None, RuntimeError("judge down")]
)
def test_a_score_that_is_none_takes_the_reward_away(api: Any, score: Any) -> None:
    env = ScoredGame(score=score)
    out = roll(api("always"), env)
    assert (out["stop_reason"], out["reward"], out["eval_reward"]) == ("env_error", None, None)
    assert out["step_rewards"] == [0.5, 0.5]
    assert env.log[-1] == "close"


def test_an_api_error_has_no_reward_and_closes_the_env(api: Any) -> None:
    env = ScoredGame()
    out = roll(api("status:404"), env)
    assert (out["stop_reason"], out["reward"], env.log) == ("api_error", None, ["reset", "close"])


def test_a_close_that_fails_is_reported_and_keeps_the_reward(api: Any) -> None:
    out = roll(api("always"), Game(close_raises=OSError("busy")))
    assert out["reward"] == 1.0
    assert out["close_error"] == "close raised OSError: busy"


def test_a_close_that_hangs_is_given_up(api: Any) -> None:
    release = threading.Event()

    class Clinging(Game):
        def close(self) -> None:
            release.wait(60)

    out = roll(api("always"), Clinging(), close_timeout_s=0.1)
    release.set()
    assert (out["reward"], out["close_error"]) == (1.0, "close did not return within 0.1 s")


@pytest.mark.parametrize("made", [None, 3, Game])
def test_a_factory_that_makes_no_env_is_an_env_error(api: Any, made: Any) -> None:
    out = roll(api("always"), made)
    assert out["stop_reason"] == "env_error"
    assert f"found {made!r}" in out["error"]


@pytest.mark.parametrize("result", ["seen", ("seen", {}), {"observation": "seen"}, StepResult])
def test_a_reset_that_returns_no_result_is_an_env_error(api: Any, result: Any) -> None:
    out = roll(api("always"), Game(reset_result=result))
    assert (out["stop_reason"], out["reward"]) == ("env_error", None)
    assert "is no StepResult" in out["error"]


def test_a_reset_that_returns_nothing_shows_nothing(api: Any) -> None:
    out = roll(api("always"), Game(reset_result=None))
    assert (out["stop_reason"], out["messages"][0]["content"]) == ("env_done", "Play.")


class HalfAsync(Env):
    """Has coroutines in place of blocking methods, which only the twins may be."""

    closed = 0

    async def reset(self, trajectory: Any = None) -> StepResult:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return StepResult("ready")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult("stepped", 1.0, True)

    async def close(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self.closed += 1


class ForeignHalfAsync:
    """The same without our base class."""

    closed = 0
    reset, step, close = HalfAsync.reset, HalfAsync.step, HalfAsync.close

    def tools(self) -> list[Any]:
        return []


@pytest.mark.parametrize("cls", [HalfAsync, ForeignHalfAsync])
def test_a_coroutine_in_place_of_a_blocking_reset_is_told_and_close_is_awaited(
    api: Any, cls: type[Any]
) -> None:
    env = cls()
    out = roll(api("always"), env)
    assert (out["stop_reason"], out["reward"], out["turns"]) == ("env_error", None, 0)
    assert "override astep or areset for a coroutine" in out["error"]
    assert env.closed == 1


def test_an_env_that_comes_too_late_is_closed_by_its_coroutine(api: Any) -> None:
    closed = threading.Event()

    class Late(Game):
        async def close(self) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            closed.set()

    go = threading.Event()

    def factory(_: Any) -> Env:
        go.wait(60)
        return Late()

    prompt: Any = {"messages": [{"role": "user", "content": "Play."}]}
    (out,) = rollout_of(api("always"), env_factory=factory, reset_timeout_s=0.1)([prompt])
    go.set()
    assert out["stop_reason"] == "env_error"
    assert closed.wait(60)


def test_a_factory_that_raises_costs_its_trajectory_only(api: Any) -> None:
    def factory(trajectory: Any) -> Env:
        if trajectory["user_data"]["n"] == 1:
            raise CapacityError("no room")
        return Game()

    prompts: Any = [
        {"messages": [{"role": "user", "content": "Play."}], "user_data": {"n": n}}
        for n in range(3)
    ]
    outs: Any = rollout_of(api("always"), env_factory=factory)(prompts)
    assert [o["stop_reason"] for o in outs] == ["env_done", "env_error", "env_done"]
    assert [o["user_data"]["n"] for o in outs] == [0, 1, 2]
    assert outs[1]["error_kind"] == "capacity"


def test_one_env_for_two_trajectories_is_refused(api: Any) -> None:
    env = Game(length=9)
    both_running = threading.Barrier(2, timeout=10)

    def factory(trajectory: Any) -> Env:
        both_running.wait()
        return env

    prompts: Any = [{"messages": [{"role": "user", "content": "Play."}]}] * 2
    outs: Any = rollout_of(api("slow:0.2"), env_factory=factory)(prompts)
    assert sorted(o["stop_reason"] for o in outs) == ["env_error", "stop"]
    assert env.log.count("close") == 1


def test_one_stateful_env_behind_one_manager_is_refused_for_several(api: Any) -> None:
    manager = ToolManager(EnvTool.from_env(Game()))
    rollout = rollout_of(api("always"), manager)
    prompts: Any = [{"messages": [{"role": "user", "content": "Play."}]}] * 2
    with pytest.raises(ValueError, match="same env"):
        rollout(prompts)
    with pytest.raises(ValueError, match="same env"):
        rollout(prompts, tool_manager=[manager, manager.copy()])


def test_the_documents_way_env_reset_and_closed_by_the_caller(api: Any) -> None:
    env = ScoredGame(length=2)
    env.reset()
    manager = ToolManager(EnvTool.from_env(env))
    prompt: Any = {"messages": [{"role": "user", "content": "Play."}]}
    (out,) = rollout_of(api=api("always"), tool_manager=manager, max_turns=10)([prompt])
    assert (out["stop_reason"], out["reward"]) == ("env_done", 1.0)
    assert env.log == ["reset", "step", "step"]


def test_a_list_of_managers_has_an_env_each(api: Any) -> None:
    envs = [Game(length=n) for n in (1, 2, 3)]
    managers = [ToolManager(EnvTool.from_env(env)) for env in envs]
    prompts: Any = [{"messages": [{"role": "user", "content": "Play."}]}] * 3
    outs: Any = rollout_of(api("always"), managers)(prompts)
    assert [o["reward"] for o in outs] == [0.5, 1.0, 1.5]


class AsyncGame(Game):
    """Speaks to nobody, but by coroutines, on the loop of the rollout."""

    async def areset(self, trajectory: Any = None) -> StepResult:
        self.loop = asyncio.get_running_loop()
        return self.reset(trajectory)

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        assert asyncio.get_running_loop() is self.loop
        return self.step(tool_name, arguments)

    async def aclose(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.close()


def test_coroutines_of_an_env_run_on_the_rollouts_loop(api: Any) -> None:
    env = AsyncGame()

    async def factory(trajectory: Any) -> Env:
        return env

    prompt: Any = {"messages": [{"role": "user", "content": "Play."}]}
    (out,) = rollout_of(api("always"), env_factory=factory)([prompt])
    assert out["stop_reason"] == "env_done"
    assert env.log == ["reset", "step", "step", "close"]


class ForeignGame:
    """An env of another framework: the same methods, no coroutines, results of its own class."""

    def __init__(self) -> None:
        self.closed = 0

    def reset(self, trajectory: Any = None) -> Any:
        return None

    def step(self, tool_name: str, arguments: Any) -> Any:
        return StepResult("won", 2, True)

    def tools(self) -> list[Any]:
        return []

    def close(self) -> None:
        self.closed += 1


def test_an_env_of_another_framework_works(api: Any) -> None:
    env = ForeignGame()
    prompt: Any = {"messages": [{"role": "user", "content": "Play."}]}
    (out,) = rollout_of(api("parallel:env_action"), env_factory=always(env))([prompt])
    assert (out["stop_reason"], out["reward"], env.closed) == ("env_done", 2.0, 1)


class SlowGame(Game):
    """Blocks in the method named, until released."""

    def __init__(self, method: str) -> None:
        super().__init__(length=9)
        self.method, self.release = method, threading.Event()
        self.closed = threading.Event()

    def _maybe(self, method: str) -> None:
        if method == self.method:
            self.release.wait(60)

    def reset(self, trajectory: Any = None) -> StepResult:
        self._maybe("reset")
        return super().reset(trajectory)

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        if self.steps == 1:
            self._maybe("step")
        return super().step(tool_name, arguments)

    def close(self) -> None:
        super().close()
        if "reset" in self.log or self.method != "reset":
            self.closed.set()


class SlowScoredGame(SlowGame):
    """Scores its trajectories, or blocks doing so."""

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        self.log.append("evaluate")
        self._maybe("evaluate")
        return [1.0]


def test_a_step_that_hangs_loses_the_episode_by_its_limit(api: Any) -> None:
    env = SlowGame("step")
    out = roll(api("always"), env, tool_timeout_s=0.1)
    env.release.set()
    assert (out["stop_reason"], out["error_kind"], out["reward"]) == ("env_error", "timeout", None)
    assert (out["retryable"], out["tool_errors"]) == (True, {"timeout": 1})
    assert env.closed.is_set()


def test_a_deadline_keeps_what_was_earned(api: Any) -> None:
    env = SlowGame("step")
    out = roll(api("always"), env, deadline_s=1.5)
    env.release.set()
    assert (out["stop_reason"], out["truncated"]) == ("deadline", True)
    assert (out["step_rewards"][0], out["eval_reward"], out["reward"]) == (0.5, None, 0.5)
    assert env.closed.is_set()
    assert "deadline_s=1.5" in out["error"]


def test_an_env_is_not_evaluated_beside_a_step_that_the_deadline_cut(api: Any) -> None:
    env = SlowScoredGame("step")
    out = roll(api("always"), env, deadline_s=1.5)
    env.release.set()
    assert "evaluate" not in env.log
    assert (out["stop_reason"], out["step_rewards"][0], out["reward"]) == ("deadline", 0.5, None)
    assert "could not be evaluated" in out["error"]


def test_a_reset_that_hangs_is_given_up_and_its_env_closed_once_it_returns(api: Any) -> None:
    env = SlowGame("reset")
    out = roll(api("always"), env, reset_timeout_s=0.1)
    assert (out["stop_reason"], out["error_kind"]) == ("env_error", "timeout")
    env.release.set()
    assert env.closed.wait(10)  # closed again after the reset that came too late
    assert env.log == ["close", "reset", "close"]


def test_an_env_that_is_made_too_late_is_closed(api: Any) -> None:
    env, release = SlowGame("none"), threading.Event()

    def factory(trajectory: Any) -> Env:
        release.wait(60)
        return env

    prompt: Any = {"messages": [{"role": "user", "content": "Play."}]}
    rollout = rollout_of(api("always"), env_factory=factory, reset_timeout_s=0.1)
    (out,) = rollout([prompt])
    assert (out["stop_reason"], env.log) == ("env_error", [])
    release.set()
    assert env.closed.wait(10)


def test_scoring_that_hangs_is_given_up(api: Any) -> None:
    env = SlowScoredGame("evaluate")
    out = roll(api("always"), env, max_turns=1, evaluate_timeout_s=0.1)
    env.release.set()
    assert (out["stop_reason"], out["error_kind"], out["reward"]) == ("env_error", "timeout", None)


class Crowded(Game):
    """Blocks in `reset` until there is room, which only a `close` makes."""

    room = threading.Semaphore(2)

    def reset(self, trajectory: Any = None) -> StepResult:
        assert self.room.acquire(timeout=30)
        return super().reset(trajectory)

    def close(self) -> None:
        if "reset" in self.log and "close" not in self.log:
            self.room.release()
        super().close()


def test_resets_that_wait_for_room_leave_threads_for_the_steps_that_make_it(api: Any) -> None:
    prompts: Any = [{"messages": [{"role": "user", "content": "Play."}]}] * 8

    def factory(trajectory: Any) -> Env:
        return Crowded()

    rollout = rollout_of(api("always"), env_factory=factory, max_threads=2)
    assert [o["stop_reason"] for o in rollout(prompts)] == ["env_done"] * 8


def test_closing_does_not_queue_behind_steps(api: Any) -> None:
    closed = threading.Event()

    class Stepping(Game):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            stepping.wait()
            assert closed.wait(20)
            return StepResult(done=True)

    class Failing(Game):
        def reset(self, trajectory: Any = None) -> StepResult:
            raise CapacityError("no room")

        def close(self) -> None:
            closed.set()

    stepping = threading.Barrier(3, timeout=20)

    def factory(trajectory: Any) -> Env:
        if trajectory["user_data"]["steps"]:
            return Stepping()
        stepping.wait()  # now both threads for steps are taken
        return Failing()

    rollout = rollout_of(api("always"), env_factory=factory, max_threads=2, close_timeout_s=10)
    message = {"role": "user", "content": "Play."}
    outs = rollout([{"messages": [message], "user_data": {"steps": n < 2}} for n in range(3)])
    assert [o["stop_reason"] for o in outs] == ["env_done", "env_done", "env_error"]
    assert "close_error" not in outs[2]


def test_timing_covers_the_phases(api: Any) -> None:
    timing = roll(api("always"), ScoredGame())["timing"]
    assert set(timing) == {*("queued", "reset", "model", "tools", "evaluate", "close", "total")}
    assert all(seconds >= 0 for seconds in timing.values())
    assert timing["model"] > 0


def test_the_line_where_an_env_raised_is_logged_once(
    api: Any, caplog: pytest.LogCaptureFixture
) -> None:
    factories: list[Any] = [fail_to_make, always(Faulty())]
    for factory in factories:
        given = [{"messages": [{"role": "user", "content": "Play."}]} for _ in range(3)]
        rollout_of(api("answer"), env_factory=factory)(given)
    made, scored = (record for record in caplog.records if "envs" in record.name)
    assert "making or resetting an env raised FaultyError: no licence" in made.getMessage()
    assert made.exc_text is not None and "in fail_to_make" in made.exc_text
    assert "the evaluate of an env raised FaultyError: no score" in scored.getMessage()
    assert scored.exc_text is not None and "in evaluate" in scored.exc_text


def test_every_step_counts_where_the_env_returns_the_same_result_again(api: Any) -> None:
    ok = StepResult("ok", 1.0)
    out = roll(api("always"), Game(results={1: ok, 2: ok, 3: ok}, length=9), max_turns=3)
    assert (out["step_rewards"], out["reward"]) == ([1.0, 1.0, 1.0], 3.0)


def test_a_result_that_is_changed_and_returned_again_counts_as_it_was_at_each_step(
    api: Any,
) -> None:
    class Changing(Game):
        result = StepResult("ok", 0.0)

        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            self.result.reward += 1.0
            return self.result

    out = roll(api("always"), Changing(), max_turns=3)
    assert out["step_rewards"] == [1.0, 2.0, 3.0]


def test_a_failure_that_is_returned_again_counts_at_each_step(api: Any) -> None:
    failed = StepResult.failed("no", done=False)
    out = roll(api("always"), Game(results={1: failed, 2: failed}, length=9), max_turns=3)
    assert (out["failed_steps"], out["tool_errors"]) == ([0, 1], {"env": 2})


def test_a_step_that_raised_failed_and_the_episode_goes_on(api: Any) -> None:
    out = roll(api("always"), Game(results={2: ValueError("illegal move")}, length=3))
    assert (out["stop_reason"], out["error"], out["failed_steps"]) == ("env_done", None, [1])
    assert (out["reward"], out["step_rewards"]) == (1.0, [0.5, 0.0, 0.5])
    assert "Error: ValueError: illegal move" in [m["content"] for m in out["messages"]]
