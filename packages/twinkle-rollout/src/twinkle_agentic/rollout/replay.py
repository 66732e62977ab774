"""Play recorded trajectories again, without a model, and compare.

The calls that a model made are given to fresh environments. An environment that is reproducible
answers as it did; where it does not, the first difference is named. That tells a reward that can
be trusted from one that depends on an unseeded random number, a clock, or a server that changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from twinkle_agentic._aio.bounded import bounded, finish_async
from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic._aio.threads import ThreadPool, run_blocking, use_pool
from twinkle_agentic.envs.base import StepResult, as_step_result, overrides_evaluate
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.protocol._messages import NOT_EXECUTED
from twinkle_agentic.rollout.types import EnvFactory, StopReason
from twinkle_agentic.tools.outcome import describe_error
from twinkle_agentic.tools.tool_manager import ToolManager

logger = logging.getLogger(__name__)

__all__ = ["Difference", "Replay", "ReplayStatus", "areplay", "arescore", "replay", "rescore"]

_SHOWN_CHARS = 300
_REWARD_TOLERANCE = 1e-9  # relative; the sum of floats in another order


class ReplayStatus(StrEnum):
    """How a replay ended."""

    SAME = "same"
    """Observations, rewards and the end came out as recorded."""
    DIFFERENT = "different"
    """The first difference is in `Replay.difference`."""
    FAILED = "failed"
    """The infrastructure failed during the replay; it says nothing about the record."""
    SKIPPED = "skipped"
    """The record is of an episode that the infrastructure ended: there is nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a replay differs from the record.

    Attributes:
        turn: The model message whose call differs, from 1; 0 for the reset.
        step: The step of the env, from 0; `None` for a call that is no step, and for the score.
        field: What differs: `observation`, `reward`, `done`, `eval_reward`, `tools`.
        recorded: What the record has, shortened.
        found: What came out now, shortened.
    """

    turn: int
    step: int | None
    field: str
    recorded: str
    found: str

    def __str__(self) -> str:
        place = f"turn {self.turn}" + ("" if self.step is None else f", step {self.step}")
        return f"{place}: {self.field} was {self.recorded}, is {self.found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of one trajectory.

    Attributes:
        id: Its `id`, or its position.
        status: How the replay ended.
        steps: Steps that were played.
        difference: The first difference.
        error: Why it failed or was skipped.
        reward: The reward now: of the steps and of `evaluate`; `None` where it did not get there.
    """

    id: str
    status: ReplayStatus
    steps: int = 0
    difference: Difference | None = None
    error: str | None = None
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    step_timeout_s: float
    reset_timeout_s: float
    evaluate_timeout_s: float
    close_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("step_timeout_s", "reset_timeout_s", "evaluate_timeout_s", "close_timeout_s"):
            check_limit(name, getattr(self, name))


async def areplay(
    trajectories: Sequence[Mapping[str, Any]],
    env_factory: EnvFactory,
    *,
    concurrency: int = 64,
    step_timeout_s: float = 600.0,
    reset_timeout_s: float = 600.0,
    evaluate_timeout_s: float = 600.0,
    on_done: Callable[[Replay], None] | None = None,
) -> list[Replay]:
    """Play the recorded calls again in fresh environments.

    Args:
        trajectories: Finished ones, as a rollout returns them.
        env_factory: As for the rollout: makes the env of one trajectory.
        concurrency: Environments at once.
        step_timeout_s: Seconds for one call.
        reset_timeout_s: Seconds to make and reset an env.
        evaluate_timeout_s: Seconds for the score.
        on_done: Called with each replay as it ends.

    Returns:
        One replay per trajectory, in order. Environments are closed on every path.

    Raises:
        ValueError: A limit is out of range.
    """
    limits = _Limits(
        step_timeout_s=step_timeout_s,
        reset_timeout_s=reset_timeout_s,
        evaluate_timeout_s=evaluate_timeout_s,
    )
    return await _each(trajectories, env_factory, _Player, concurrency, limits, on_done)


async def arescore(
    trajectories: Sequence[Mapping[str, Any]],
    env_factory: EnvFactory,
    *,
    concurrency: int = 64,
    reset_timeout_s: float = 600.0,
    evaluate_timeout_s: float = 600.0,
    on_done: Callable[[Replay], None] | None = None,
) -> list[Replay]:
    """Run `evaluate` alone, in a fresh env, and compare with the recorded `eval_reward`.

    For environments whose score is read from the messages. One that scores the state its steps left
    needs `areplay`.

    Args:
        trajectories: Finished ones.
        env_factory: As for the rollout.
        concurrency: Environments at once.
        reset_timeout_s: Seconds to make and reset an env.
        evaluate_timeout_s: Seconds for the score.
        on_done: Called with each result as it comes.

    Raises:
        ValueError: A limit is out of range.
    """
    limits = _Limits(
        step_timeout_s=evaluate_timeout_s,
        reset_timeout_s=reset_timeout_s,
        evaluate_timeout_s=evaluate_timeout_s,
    )
    return await _each(trajectories, env_factory, _Scorer, concurrency, limits, on_done)


def replay(
    trajectories: Sequence[Mapping[str, Any]], env_factory: EnvFactory, **options: Any
) -> list[Replay]:
    """As `areplay`, from synchronous code."""
    return run_sync(areplay(trajectories, env_factory, **options))


def rescore(
    trajectories: Sequence[Mapping[str, Any]], env_factory: EnvFactory, **options: Any
) -> list[Replay]:
    """As `arescore`, from synchronous code."""
    return run_sync(arescore(trajectories, env_factory, **options))


class _DifferentError(Exception):
    """The replay has left the record."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


class _Player:
    """Plays one trajectory again."""

    def __init__(self, name: str, record: Mapping[str, Any], limits: _Limits) -> None:
        self._name = name
        self._record = record
        self._limits = limits
        self._rewards: list[float] = []
        self._eval_reward: float | None = None
        self._done = False

    async def run(self, env_factory: EnvFactory) -> Replay:
        """Make the env, play, score, close."""
        record = self._record
        if record.get("reward") is None or _infrastructure(record):
            why = record.get("error") or "the record has no reward"
            return self._result(ReplayStatus.SKIPPED, error=str(why))
        env: Any = None
        try:
            env = await bounded(self._open(env_factory), self._limits.reset_timeout_s)
            await self.play(env)
        except _DifferentError as error:
            return self._result(ReplayStatus.DIFFERENT, difference=error.difference)
        except Exception as error:
            return self._result(ReplayStatus.FAILED, error=describe_error(error))
        finally:
            if env is not None:
                await self._close(env)
        return self._result(ReplayStatus.SAME, reward=sum(self._rewards) + (self._eval_reward or 0))

    async def play(self, env: Any) -> None:
        """Give the recorded calls to the env, in order."""
        tools = EnvTool.from_env(env, timeout_s=self._limits.step_timeout_s)
        manager = ToolManager(tools)
        messages: list[Mapping[str, Any]] = list(self._record.get("messages") or ())
        turn = 0
        for position, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            turn += 1
            answers = {
                str(answer.get("tool_call_id")): str(answer.get("content") or "")
                for answer in messages[position + 1 :]
                if answer.get("role") == "tool"
            }
            for call in message.get("tool_calls") or ():
                recorded = answers.get(str(call.get("id")))
                if recorded is None or _never_ran(recorded, call):
                    continue
                await self._call(manager, call, turn, recorded)
        ended = self._record.get("stop_reason") in (StopReason.ENV_DONE, "env_truncated")
        if ended != self._done:
            self._differs(turn, self._last_step, "done", ended, self._done)
        await self.score(env)

    async def _call(
        self, manager: ToolManager, call: Mapping[str, Any], turn: int, recorded: str
    ) -> None:
        outcome = await manager.arun(call)
        step = outcome.value if isinstance(outcome.value, StepResult) else None
        if step is not None and step.info.get("error") and step.done:
            raise RuntimeError(f"turn {turn}: {step.info['error']}")
        number: int | None = None
        if step is not None:
            number = len(self._rewards)
            counts = step.error is None and not step.info.get("reward_missing")
            self._rewards.append(step.reward if counts else 0.0)
        if outcome.text != recorded:
            self._differs(turn, number, "observation", recorded, outcome.text)
        if step is None:
            return
        expected = list(self._record.get("step_rewards") or ())
        was = expected[len(self._rewards) - 1] if len(expected) >= len(self._rewards) else None
        if was is None or not math.isclose(
            was, self._rewards[-1], rel_tol=_REWARD_TOLERANCE, abs_tol=_REWARD_TOLERANCE
        ):
            self._differs(turn, number, "reward", was, self._rewards[-1])
        self._done = step.done
        if step.done and len(self._rewards) < len(expected):
            self._differs(turn, number, "done", False, True)

    async def score(self, env: Any) -> None:
        """Let an env that scores the whole do so, and compare."""
        recorded = self._record.get("eval_reward")
        if recorded is None or not overrides_evaluate(env):
            return
        evaluate: Any = getattr(env, "aevaluate", None)
        trajectory: Any = [dict(self._record)]
        work = run_blocking(env.evaluate, trajectory) if evaluate is None else evaluate(trajectory)
        (found,) = await bounded(work, self._limits.evaluate_timeout_s)
        self._eval_reward = float(found)
        if not math.isclose(
            recorded, self._eval_reward, rel_tol=_REWARD_TOLERANCE, abs_tol=_REWARD_TOLERANCE
        ):
            turns = int(self._record.get("turns") or 0)
            self._differs(turns, None, "eval_reward", recorded, self._eval_reward)

    @property
    def _last_step(self) -> int | None:
        return len(self._rewards) - 1 if self._rewards else None

    async def _open(self, env_factory: EnvFactory) -> Any:
        trajectory: Any = dict(self._record)
        env: Any = await finish_async(run_blocking(env_factory, trajectory))
        try:
            acquire: Any = getattr(env, "aacquire", None)
            if acquire is not None:
                await acquire()
            areset: Any = getattr(env, "areset", None)
            first = await (
                run_blocking(env.reset, trajectory) if areset is None else areset(trajectory)
            )
            as_step_result(first)
        except BaseException:
            await self._close(env)
            raise
        return env

    async def _close(self, env: Any) -> None:
        aclose: Any = getattr(env, "aclose", None)
        closing = run_blocking(env.close) if aclose is None else aclose()
        try:
            await bounded(closing, self._limits.close_timeout_s)
        except Exception as error:
            logger.warning("closing the env of %s: %s", self._name, describe_error(error))

    def _differs(
        self, turn: int, step: int | None, field: str, recorded: object, found: object
    ) -> None:
        raise _DifferentError(
            Difference(
                turn=turn,
                step=step,
                field=field,
                recorded=_shown(recorded, found),
                found=_shown(found, recorded),
            )
        )

    def _result(self, status: ReplayStatus, **fields: Any) -> Replay:
        return Replay(id=self._name, status=status, steps=len(self._rewards), **fields)


class _Scorer(_Player):
    """Scores one trajectory again, without playing it."""

    async def play(self, env: Any) -> None:
        """Score only."""
        self._rewards = [float(reward) for reward in self._record.get("step_rewards") or ()]
        await self.score(env)


async def _each(
    trajectories: Sequence[Mapping[str, Any]],
    env_factory: EnvFactory,
    player: type[_Player],
    concurrency: int,
    limits: _Limits,
    on_done: Callable[[Replay], None] | None,
) -> list[Replay]:
    check_count("concurrency", concurrency)
    places = asyncio.Semaphore(concurrency)
    use_pool(ThreadPool(2 * concurrency))

    async def one(position: int, record: Mapping[str, Any]) -> Replay:
        async with places:
            name = str(record.get("id", position))
            result = await player(name, record, limits).run(env_factory)
        if on_done is not None:
            on_done(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in enumerate(trajectories)]
    return [task.result() for task in tasks]


def _infrastructure(record: Mapping[str, Any]) -> bool:
    try:
        return StopReason(str(record.get("stop_reason"))).infrastructure
    except ValueError:
        return False


def _never_ran(answer: str, call: Mapping[str, Any]) -> bool:
    """Tell whether a call was refused before its tool ran; `ToolManager` words it so."""
    function: Mapping[str, Any] = call.get("function") or {}
    name = function.get("name")
    return answer.startswith((NOT_EXECUTED, "Error: unknown tool ", f"Error: tool {name!r}: "))


def _shown(value: object, other: object) -> str:
    """Shorten a value to the place where it differs from another one."""
    if not isinstance(value, str) or not isinstance(other, str):
        return repr(value)
    start = next(
        (at for at, pair in enumerate(zip(value, other, strict=False)) if pair[0] != pair[1]),
        min(len(value), len(other)),
    )
    start = max(0, start - 40)
    cut = value[start : start + _SHOWN_CHARS]
    return ("..." if start else "") + repr(cut)
