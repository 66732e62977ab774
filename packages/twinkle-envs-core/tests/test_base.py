from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import pickle
import threading
from abc import ABC, abstractmethod
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from twinkle_agentic.envs.base import (
    Env,
    StepResult,
    as_step_result,
    episode_number,
    overrides_evaluate,
)
from twinkle_agentic.envs.errors import EnvError, ErrorKind, SessionClosedError


class Scalar:
    """A scalar of numpy's kind."""

    def __init__(self, value: Any, shape: tuple[int, ...] = ()) -> None:
        self.value, self.shape = value, shape

    def __float__(self) -> float:
        return float(self.value)


class Bare(Env):
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult(tool_name, 1.0)


# --- StepResult


def test_step_result_takes_its_fields_by_position() -> None:
    result = StepResult("seen", 0.5, True, {"a": 1})
    assert dataclasses.astuple(result) == ("seen", 0.5, True, {"a": 1})


def test_step_result_is_empty_by_default_and_shares_nothing() -> None:
    one, two = StepResult(), StepResult()
    one.info["a"] = 1
    assert two == StepResult("", 0.0, False, {})
    assert two.error is None


def test_step_result_pickles() -> None:
    result = StepResult.failed(SessionClosedError("gone"))
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize(
    ("reward", "number"),
    [
        (1, 1.0),
        (-2.5, -2.5),
        (True, 1.0),
        (False, 0.0),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (Scalar(0.5), 0.5),
        (10**30, 1e30),
    ],
)
def test_number_of_any_origin_is_a_reward(reward: Any, number: float) -> None:
    result = StepResult.scored("seen", reward, done=True, info={"a": 1})
    assert result == StepResult("seen", number, True, {"a": 1})
    assert type(result.reward) is float


def test_numpy_and_its_scalars_are_rewards() -> None:
    numpy = pytest.importorskip("numpy", reason="numpy is no dependency; real arrays are a bonus")
    for reward in (numpy.float32(0.5), numpy.int8(1), numpy.bool_(True), numpy.array(0.5)):
        result = StepResult.scored("", reward)
        assert (result.reward, result.info) == (float(reward), {})
    for reward in (numpy.array([0.5]), numpy.array([1.0, 2.0]), numpy.float64("nan")):
        assert StepResult.scored("", reward).error


def test_missing_reward_is_flagged() -> None:
    result = StepResult.scored("seen", None)
    assert result == StepResult("seen", 0.0, False, {"reward_missing": True})


@pytest.mark.parametrize("reward", [0.0, 1.5])
def test_a_reward_that_is_set_is_not_missing(reward: float) -> None:
    inner = StepResult.scored("seen", None, info={"a": 1})
    outer = copy.copy(inner)
    outer.reward = reward
    assert outer == StepResult("seen", reward, False, {"a": 1})
    assert inner == StepResult("seen", 0.0, False, {"a": 1, "reward_missing": True})


def test_a_reward_that_is_given_with_the_info_of_a_result_without_one_is_not_missing() -> None:
    inner = StepResult.scored("seen", None)
    assert StepResult.scored("seen", 0, info=inner.info) == StepResult("seen")


def test_a_missing_reward_travels() -> None:
    result = StepResult.scored("seen", None)
    assert pickle.loads(pickle.dumps(result)) == result
    assert dataclasses.replace(result, observation="x").info == {"reward_missing": True}


@pytest.mark.parametrize(
    "reward",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1.0",
        "high",
        b"1",
        bytearray(b"1"),
        [1.0],
        {},
        1j,
        10**400,
        Decimal("NaN"),
        Scalar(math.nan),
        Scalar("not a number"),
        Scalar(1.0, (1,)),
        object(),
    ],
)
def test_reward_that_is_no_finite_number_makes_the_step_a_failed_one(reward: Any) -> None:
    result = StepResult.scored("seen", reward, done=False)
    assert (result.observation, result.reward, result.done) == ("seen", 0.0, False)
    assert result.error is not None
    assert "the environment gave the reward" in result.error
    assert result.info["error_kind"] == "env"
    assert result.info["retryable"] is False


def test_bad_reward_does_not_hide_an_earlier_error() -> None:
    result = StepResult.scored("seen", math.nan, info={"error": "broke", "error_kind": "tool"})
    assert (result.error, result.info["error_kind"]) == ("broke", "tool")


def test_given_info_is_not_changed() -> None:
    info: dict[str, Any] = {}
    StepResult.scored("seen", math.nan, info=info)
    assert info == {}


def test_failed_result_takes_kind_and_retryable_from_the_error() -> None:
    result = StepResult.failed(SessionClosedError("gone"))
    assert result == StepResult(
        "Error: gone",
        0.0,
        True,
        {"error": "gone", "error_kind": "session_lost", "retryable": True},
    )
    assert type(result.info["error_kind"]) is str


def test_failed_result_can_be_told_otherwise() -> None:
    result = StepResult.failed(
        EnvError("x", retryable=True),
        kind=ErrorKind.TOOL,
        done=False,
        retryable=False,
        observation="try again",
        exit_code=3,
    )
    info = {"error": "x", "error_kind": "tool", "retryable": False, "exit_code": 3}
    assert result == StepResult("try again", 0.0, False, info)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (EnvError(), "EnvError"),
        ("", "unknown error"),
        ("broke", "broke"),
        (Unprintable(), "Unprintable: <Unprintable that cannot be printed: RuntimeError>"),
        (ValueError("\ud800"), "ValueError: \ufffd"),
    ],
)
def test_error_text_is_never_empty(error: Any, text: str) -> None:
    result = StepResult.failed(error)
    assert (result.error, result.observation) == (text, f"Error: {text}")
    assert result.info["error_kind"] == "env"


def test_huge_error_text_is_cut() -> None:
    result = StepResult.failed(ValueError("x" * 5_000_000))
    assert result.error is not None
    assert len(result.error) < 40_000
    assert len(result.observation) < 40_000


# --- as_step_result


def test_sound_result_passes_as_it_is() -> None:
    result = StepResult("seen", 0.5, False, {"episode_reward": 1.5})
    assert as_step_result(result) is result
    missing = StepResult.scored("seen", None)
    assert as_step_result(missing) is missing


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (StepResult("seen", 1, True), StepResult("seen", 1.0, True)),
        (StepResult("seen", Scalar(0.5)), StepResult("seen", 0.5)),  # type: ignore[arg-type]
        (StepResult("seen", None), StepResult("seen", 0.0, False, {"reward_missing": True})),  # type: ignore[arg-type]
        (StepResult({"a": 1}), StepResult('{"a": 1}')),  # type: ignore[arg-type]
        (StepResult(None), StepResult("")),  # type: ignore[arg-type]
        (StepResult("seen", 0.0, Scalar(1)), StepResult("seen", 0.0, True)),  # type: ignore[arg-type]
        (StepResult("seen", 0.0, False, None), StepResult("seen")),  # type: ignore[arg-type]
        (StepResult("seen", 1.0, False, {"reward_missing": True}), StepResult("seen", 1.0)),
        (
            StepResult("\ud800", 0.0, False, {"reward_missing": True}),
            StepResult("\ufffd", 0.0, False, {"reward_missing": True}),
        ),
    ],
)
def test_loose_result_is_put_right(value: Any, expected: StepResult) -> None:
    result = as_step_result(value)
    assert result == expected
    assert (type(result.reward), type(result.done)) == (float, bool)


def test_result_of_another_framework_is_taken_by_its_attributes() -> None:
    @dataclasses.dataclass
    class Other:
        observation: str = "seen"
        reward: float = 0.5
        done: bool = True
        info: Any = dataclasses.field(default_factory=lambda: {"a": 1})

    assert as_step_result(Other()) == StepResult("seen", 0.5, True, {"a": 1})


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1.0"])
def test_bad_reward_of_a_result_is_flagged(reward: Any) -> None:
    result = as_step_result(StepResult("seen", reward))
    assert (result.observation, result.reward, result.done) == ("seen", 0.0, False)
    assert result.info["error_kind"] == "env"


@pytest.mark.parametrize("value", [math.nan, math.inf, "2", [1]])
def test_bad_episode_reward_is_flagged_and_dropped(value: Any) -> None:
    given = StepResult("seen", 0.5, False, {"episode_reward": value})
    result = as_step_result(given)
    assert "episode_reward" not in result.info
    assert "the environment gave the episode_reward" in (result.error or "")
    assert given.info == {"episode_reward": value}


class Ambiguous:
    """Has no truth and no text, like the arrays and proxies of some libraries."""

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    __str__ = __repr__ = lambda self: str(bool(self))


@pytest.mark.parametrize(
    ("info", "told"),
    [
        ({"error": ValueError("bad")}, {"error": "ValueError: bad"}),
        ({"error": ["a", "b"]}, {"error": '["a", "b"]'}),
        ({"error": False}, {"error": ""}),
        ({"error": None}, {"error": None}),
        ({"error": "e", "error_kind": 3, "retryable": 1}, {"error_kind": "3", "retryable": True}),
        ({"error": "e", "error_kind": ErrorKind.TIMEOUT}, {"error_kind": "timeout"}),
        ({"error": "e", "retryable": Ambiguous()}, {"retryable": True}),
        ({"error": "e", "error_kind": []}, {"error_kind": ""}),
    ],
)
def test_what_info_says_of_a_failure_has_the_types_that_are_promised(
    info: dict[str, Any], told: dict[str, Any]
) -> None:
    result = as_step_result(StepResult("seen", 0.0, True, info))
    assert result.info == {**info, **told}
    assert bool(result.error) == bool(told.get("error", "e"))


def test_an_error_that_cannot_be_printed_is_one_all_the_same() -> None:
    result = as_step_result(StepResult("seen", 0.5, True, {"error": Ambiguous()}))
    assert result.error == "<Ambiguous that cannot be printed: RuntimeError>"


def test_absent_episode_reward_is_no_error() -> None:
    result = as_step_result(StepResult("seen", 0.5, False, {"episode_reward": None}))
    assert result == StepResult("seen", 0.5)


def test_lone_surrogates_of_an_observation_are_replaced() -> None:
    assert as_step_result(StepResult("a\ud800")).observation == "a\ufffd"


@pytest.mark.parametrize("value", [None, "seen", ("seen", 1.0, True, {}), {}, 3, StepResult])
def test_what_is_no_result_ends_the_episode(value: Any) -> None:
    result = as_step_result(value)
    assert result.done
    assert "is no StepResult" in (result.error or "")
    assert result.info["error_kind"] == "env"


def test_what_cannot_be_printed_is_flagged_all_the_same() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("mute")

    assert "Mute that cannot be printed" in (as_step_result(Mute()).error or "")
    assert "Mute that cannot be printed" in (StepResult.scored("", Mute()).error or "")


def test_coroutine_instead_of_a_result_names_the_remedy() -> None:
    async def step() -> StepResult:
        return StepResult()

    result = as_step_result(step())
    assert result.done
    assert "override astep" in (result.error or "")


# --- Env


def test_env_needs_only_step() -> None:
    env = Bare()
    assert env.reset() == StepResult()
    assert env.step("go", {}) == StepResult("go", 1.0)
    assert env.tools() == []
    assert env.evaluate([{}, {}]) == [0.0, 0.0]
    assert env.close() is None


def test_env_without_step_cannot_be_made() -> None:
    class Nothing(Env):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]


async def test_async_twins_run_the_sync_methods_in_a_thread() -> None:
    class Recording(Bare):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def note(self, *call: Any) -> None:
            assert threading.current_thread() is not threading.main_thread()
            self.calls.append(call)

        def reset(self, trajectory: Any = None) -> StepResult:
            self.note("reset", trajectory)
            return StepResult("ready")

        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            self.note("step", tool_name, arguments)
            return StepResult("stepped")

        def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
            self.note("evaluate", trajectories, kwargs)
            return [2.0]

        def close(self) -> None:
            self.note("close")

    async with Recording() as env:
        assert await env.areset({"messages": []}) == StepResult("ready")
        assert await env.astep("go", {"a": 1}) == StepResult("stepped")
        assert await env.aevaluate([{}], strict=True) == [2.0]
    assert env.calls == [
        ("reset", {"messages": []}),
        ("step", "go", {"a": 1}),
        ("evaluate", [{}], {"strict": True}),
        ("close",),
    ]


def test_env_is_closed_at_the_end_of_its_block_also_after_an_error() -> None:
    class Closing(Bare):
        closed = False

        def close(self) -> None:
            self.closed = True

    with pytest.raises(ZeroDivisionError), Closing() as env:
        raise ZeroDivisionError
    assert env.closed


async def test_slow_envs_do_not_hold_the_loop() -> None:
    together = threading.Barrier(8)

    class Meeting(Bare):
        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            together.wait(30)
            return StepResult("met")

    results = await asyncio.gather(*(Meeting().astep("go", {}) for _ in range(8)))
    assert [result.observation for result in results] == ["met"] * 8


class WithReset(Bare):
    def reset(self, trajectory: Any = None) -> StepResult:
        return super().reset(trajectory)


class WithSuperReset(WithReset):
    def reset(self, trajectory: Any = None) -> StepResult:
        return super().reset(trajectory)


class Mixin:
    def reset(self, trajectory: Any = None) -> StepResult:
        return StepResult("from a mixin")


class WithMixin(Mixin, Bare):  # type: ignore[misc]
    pass


class WithAreset(Bare):
    async def areset(self, trajectory: Any = None) -> StepResult:
        return StepResult("from a coroutine")


@pytest.mark.parametrize("cls", [Bare, WithReset, WithSuperReset, WithMixin, WithAreset])
async def test_every_reset_changes_the_episode_number(cls: Any) -> None:
    env = cls()
    numbers = [episode_number(env)]
    for _ in range(3):
        await env.areset()
        numbers.append(episode_number(env))
    for _ in range(3):
        env.reset()
        numbers.append(episode_number(env))
    assert len(set(numbers)) == 7
    assert numbers == sorted(numbers)


def test_reset_keeps_its_signature_and_its_class_stays_abstract() -> None:
    class Documented(Bare):
        def reset(self, trajectory: Any = None, *, seed: int = 3) -> StepResult:
            """Start."""
            return StepResult(str(seed))

    assert Documented.reset.__doc__ == "Start."
    assert Documented().reset(seed=5).observation == "5"


def test_failed_reset_counts_too() -> None:
    class Failing(Bare):
        def reset(self, trajectory: Any = None) -> StepResult:
            raise EnvError("no")

    env = Failing()
    with pytest.raises(EnvError):
        env.reset()
    assert episode_number(env) == 1


def test_objects_that_are_no_env_have_episode_zero() -> None:
    assert episode_number(object()) == 0


class Scoring(Bare):
    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(trajectories)


class ScoringAsync(Bare):
    async def aevaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(trajectories)


class ForeignEnv(ABC):
    """The base of another framework."""

    @abstractmethod
    def step(self, tool_name: str, arguments: Any) -> Any: ...

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [0.0] * len(trajectories)


class ForeignGame(ForeignEnv):
    def step(self, tool_name: str, arguments: Any) -> Any:
        return None


class ForeignScoring(ForeignGame):
    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(trajectories)


class PlainScoring:
    def step(self, tool_name: str, arguments: Any) -> Any:
        return None

    def evaluate(self, trajectories: Any) -> list[float]:
        return [1.0] * len(trajectories)


def named_env(base: Any) -> Any:
    """A subclass that is called as the base is."""
    return type("Env", (base,), {})


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (Bare, False),
        (named_env(Bare), False),
        (Scoring, True),
        (named_env(Scoring), True),
        (type("Env", (Bare,), {"evaluate": Scoring.evaluate}), True),
        (ScoringAsync, True),
        (ForeignGame, False),
        (named_env(ForeignGame), False),
        (type("Env", (ForeignGame,), {"evaluate": PlainScoring.evaluate}), True),
        (ForeignScoring, True),
        (PlainScoring, True),
        (type("Env", (PlainScoring,), {}), True),
        (type("Game", (type("Env", (), {"evaluate": PlainScoring.evaluate}),), {}), False),
        (object, False),
    ],
)
def test_own_evaluate_is_told_from_the_zeros_of_a_base(cls: Any, own: bool) -> None:
    assert overrides_evaluate(cls()) is own
