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

from twinkle_agentic._aio.bounded import Deadline
from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.protocol._messages import NOT_EXECUTED
from twinkle_agentic.rollout._episode import BROKEN_CALL
from twinkle_agentic.rollout._episode_env import EnvPlan, EnvThreads, EpisodeEnv
from twinkle_agentic.rollout._tool_calls import Toolbox
from twinkle_agentic.rollout.types import EnvFactory, Limits, StopReason
from twinkle_agentic.tools._outcome import describe_error
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
    limits = Limits(
        tool_timeout_s=_checked("step_timeout_s", step_timeout_s),
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
    limits = Limits(reset_timeout_s=reset_timeout_s, evaluate_timeout_s=evaluate_timeout_s)
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
    """Plays one trajectory again, in an env that is led as a rollout leads it."""

    def __init__(self, name: str, record: Mapping[str, Any], plan: EnvPlan) -> None:
        self._name = name
        self._record = record
        self._plan = plan
        self._toolbox = Toolbox(ToolManager())
        self._eval_reward: float | None = None

    async def run(self) -> Replay:
        """Make the env, play, score, close."""
        record = self._record
        if record.get("reward") is None or _infrastructure(record):
            why = record.get("error") or "the record has no reward"
            return self._result(ReplayStatus.SKIPPED, error=str(why))
        env = EpisodeEnv(self._plan, record)
        try:
            self._toolbox = await env.open(Deadline(None))
            await self.play()
            await self._score(env)
        except _DifferentError as error:
            return self._result(ReplayStatus.DIFFERENT, difference=error.difference)
        except Exception as error:
            return self._result(ReplayStatus.FAILED, error=describe_error(error))
        finally:
            await env.close()
            if env.close_error is not None:
                logger.warning("closing the env of %s: %s", self._name, env.close_error)
        return self._result(ReplayStatus.SAME, reward=self.earned() + (self._eval_reward or 0.0))

    async def play(self) -> None:
        """Give what the model wrote to the env, in order."""
        messages: list[dict[str, Any]] = list(self._record.get("messages") or ())
        turn = 0
        for position, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            turn += 1
            following = messages[position + 1 :]
            if message.get("tool_calls"):
                await self._call_all(message["tool_calls"], following, turn)
            elif following and following[0].get("role") == "user":
                await self._reply(message, str(following[0].get("content") or ""), turn)
        ended = self._record.get("stop_reason") in (StopReason.ENV_DONE, StopReason.ENV_TRUNCATED)
        if ended != self._toolbox.done:
            self._differs(turn, self._steps - 1 if self._steps else None, "done", ended, not ended)

    def earned(self) -> float:
        """Return what the steps earned."""
        return sum(self._toolbox.steps.rewards)

    async def _call_all(
        self,
        calls: Sequence[dict[str, Any]],
        following: Sequence[Mapping[str, Any]],
        turn: int,
    ) -> None:
        answers = {
            str(answer.get("tool_call_id")): str(answer.get("content") or "")
            for answer in following
            if answer.get("role") == "tool"
        }
        for call in calls:
            recorded = answers.get(str(call.get("id")))
            if recorded is None or _never_ran(recorded, call):
                continue
            before = self._steps
            text = await self._toolbox.run(call, self._plan.limits.tool_timeout_s)
            self._compare(turn, before, recorded, text)

    async def _reply(self, message: dict[str, Any], recorded: str, turn: int) -> None:
        if recorded == BROKEN_CALL:  # of the rollout, not of the env
            return
        before = self._steps
        text = await self._toolbox.reply(message, self._plan.limits.tool_timeout_s)
        if text is not None:
            self._compare(turn, before, recorded, text)

    def _compare(self, turn: int, before: int, recorded: str, text: str) -> None:
        """Compare what came back, and the step that was taken for it, if any."""
        steps = self._toolbox.steps
        if (failure := steps.lost_episode_failure) is not None:
            raise RuntimeError(f"turn {turn}: {failure.text}")
        step = before if self._steps > before else None
        if text != recorded:
            self._differs(turn, step, "observation", recorded, text)
        if step is None:
            return
        expected: list[float] = self._record.get("step_rewards") or []
        was = expected[step] if len(expected) > step else None
        if was is None or not _equal(was, steps.rewards[step]):
            self._differs(turn, step, "reward", was, steps.rewards[step])
        if self._toolbox.done and self._steps < len(expected):
            self._differs(turn, step, "done", False, True)

    async def _score(self, env: EpisodeEnv) -> None:
        """Let an env that scores the whole do so, and compare."""
        recorded = self._record.get("eval_reward")
        if recorded is None or not env.scores:
            return
        self._eval_reward = await env.score(self._record)
        if not _equal(recorded, self._eval_reward):
            turns = int(self._record.get("turns") or 0)
            self._differs(turns, None, "eval_reward", recorded, self._eval_reward)

    @property
    def _steps(self) -> int:
        return len(self._toolbox.steps.rewards)

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
        return Replay(id=self._name, status=status, steps=self._steps, **fields)


class _Scorer(_Player):
    """Scores one trajectory again, without playing it."""

    async def play(self) -> None:
        """Play nothing."""

    def earned(self) -> float:
        """Return what the steps of the record earned."""
        return sum(float(reward) for reward in self._record.get("step_rewards") or ())


async def _each(
    trajectories: Sequence[Mapping[str, Any]],
    env_factory: EnvFactory,
    player: type[_Player],
    concurrency: int,
    limits: Limits,
    on_done: Callable[[Replay], None] | None,
) -> list[Replay]:
    check_count("concurrency", concurrency)
    places = asyncio.Semaphore(concurrency)
    plan = EnvPlan(
        factory=env_factory,
        limits=limits,
        reset_observation="ignore",
        threads=EnvThreads(concurrency),
    )

    async def one(position: int, record: Mapping[str, Any]) -> Replay:
        async with places:
            result = await player(str(record.get("id", position)), record, plan).run()
        if on_done is not None:
            on_done(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in enumerate(trajectories)]
    return [task.result() for task in tasks]


def _checked(name: str, seconds: float) -> float:
    check_limit(name, seconds)
    return seconds


def _equal(recorded: float, found: float) -> bool:
    return math.isclose(recorded, found, rel_tol=_REWARD_TOLERANCE, abs_tol=_REWARD_TOLERANCE)


def _infrastructure(record: Mapping[str, Any]) -> bool:
    try:
        return StopReason(str(record.get("stop_reason"))).is_infrastructure
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
