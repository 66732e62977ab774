"""The word game in the workers of a pool, played by leased adapters through the rollout."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.openenv import EnvPool
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout

pytestmark = pytest.mark.integration

GAMES = Path(__file__).parents[1] / "cookbook" / "rl" / "envs"
WORDS = GAMES / "word_game_env" / "server" / "words.py"


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    """64 games on two workers of a Ray that the pool starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(GAMES), *sys.path])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        with EnvPool(
            64,
            env_kwargs={"env_name": "word_game_env", "tools": "auto"},
            num_workers=2,
            ray_options={
                "address": "local",
                "num_cpus": 2,
                "include_dashboard": False,
                "log_to_driver": False,
                "object_store_memory": 80 * 2**20,
            },
        ) as pool:
            yield pool


@pytest.fixture(scope="module")
def words() -> list[str]:
    """The secrets of five letters."""
    names: dict[str, Any] = {}
    exec(compile(WORDS.read_text(), str(WORDS), "exec"), names)
    return list(names["SECRETS"][5])


class Player:
    """Guesses a word that fits all marks so far; an endpoint as the rollout sees it."""

    def __init__(self, words: list[str], on_guess: Any = None) -> None:
        self._words = words
        self._on_guess = on_guess

    async def acomplete(
        self, trajectory: Any, sampling_params: Any, *, timeout_s: float | None, **_: Any
    ) -> Any:
        from twinkle_agentic.protocol._reply import Completion

        await asyncio.sleep(0)
        if self._on_guess is not None:
            await self._on_guess(trajectory)
        (tool,) = trajectory["tools"]
        seen = re.findall(r"^([a-z]{5})  ([=~.]{5})$", _last_tool_text(trajectory), re.MULTILINE)
        fits = [w for w in self._words if all(_marks(w, guess) == marks for guess, marks in seen)]
        call = {
            "id": f"call_{len(trajectory['messages'])}",
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "arguments": f'{{"guess": "{fits[0]}"}}',
            },
        }
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return Completion(messages=[{**message, "finish_reason": "tool_calls"}], usage={})


def _last_tool_text(trajectory: Any) -> str:
    texts = [m["content"] for m in trajectory["messages"] if m["role"] == "tool"]
    return texts[-1] if texts else ""


def _marks(secret: str, guess: str) -> str:
    left = [s for s, g in zip(secret, guess, strict=True) if s != g]
    marks = ""
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            marks += "="
        elif g in left:
            left.remove(g)
            marks += "~"
        else:
            marks += "."
    return marks


def prompts(count: int) -> list[Any]:
    return [
        {
            "messages": [{"role": "user", "content": "Play the word game."}],
            "user_data": {"seed": seed, "difficulty": "easy"},
        }
        for seed in range(count)
    ]


def secret_of(seed: int, words: list[str]) -> str:
    return random.Random(seed).choice(words)


def test_64_leased_adapters_play_the_word_game(pool: EnvPool, words: list[str]) -> None:
    rollout: Any = APIMultiTurnRollout(
        Player(words), env_factory=lambda trajectory: pool.lease(), max_turns=8
    )
    played = rollout(prompts(64))
    for seed, episode in enumerate(played):
        assert episode["stop_reason"] == "env_done", episode["error"]
        assert "You have 8 attempts" in episode["messages"][0]["content"]
        said = episode["messages"][-1]["content"]
        if episode["reward"] > 1:
            assert f"Yes, the word is {secret_of(seed, words)}." in said
        else:
            assert f"The word was {secret_of(seed, words)}." in said
        assert episode["reward"] == pytest.approx(sum(episode["step_rewards"]))
        assert episode["eval_reward"] is None  # the game does not score
    assert sum(episode["reward"] > 1 for episode in played) > 55
    assert pool.num_free == 64


def test_more_episodes_than_slots_wait_for_their_turn(pool: EnvPool, words: list[str]) -> None:
    held = [pool.lease() for _ in range(60)]
    try:
        rollout: Any = APIMultiTurnRollout(
            Player(words), env_factory=lambda trajectory: pool.lease(), max_turns=8
        )
        played = rollout(prompts(40))
        assert {episode["stop_reason"] for episode in played} == {"env_done"}
        assert pool.num_free == 4
    finally:
        for env in held:
            env.close()


class Slow(Env):
    """Works for a while and is done."""

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        time.sleep(0.6)
        return StepResult("done", reward=1.0, done=True)


class Caller:
    """Calls the one tool there is."""

    async def acomplete(self, trajectory: Any, sampling_params: Any, **_: Any) -> Any:
        from twinkle_agentic.protocol._reply import Completion

        name = trajectory["tools"][0]["function"]["name"]
        call = {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}
        return Completion(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_the_wait_for_a_slot_counts_against_no_limit_of_the_episode() -> None:
    with EnvPool(1, env_factory=Slow) as pool:
        rollout: Any = APIMultiTurnRollout(
            Caller(),
            env_factory=lambda trajectory: pool.lease(),
            reset_timeout_s=1.0,
            deadline_s=2.0,
        )
        played = rollout([{"messages": [{"role": "user", "content": "Go."}]}] * 6)
    assert [(e["stop_reason"], e["reward"]) for e in played] == [("env_done", 1.0)] * 6


def test_killed_worker_costs_the_episodes_it_held_and_no_others(
    pool: EnvPool, words: list[str]
) -> None:
    victim = next(w for w in pool.stats() if w.worker == 0)
    assert victim.pid is not None
    counts = Counter[str]()
    killed = asyncio.Event()

    def look() -> None:
        """Kill the worker once every game is in its second turn, or was over with the first."""
        if counts.total() == 64 and not killed.is_set():
            os.kill(victim.pid or 0, signal.SIGKILL)
            killed.set()

    async def on_guess(trajectory: Any) -> None:
        if _last_tool_text(trajectory) and not killed.is_set():
            counts["in the second turn"] += 1
            look()
            await killed.wait()

    def on_done(_: Any) -> None:
        counts["over"] += 1
        look()

    rollout: Any = APIMultiTurnRollout(
        Player(words, on_guess),
        env_factory=lambda trajectory: pool.lease(),
        max_turns=8,
        on_done=on_done,
    )
    played = rollout(prompts(64))
    lost = [episode for episode in played if episode["stop_reason"] == "env_error"]
    kept = [episode for episode in played if episode["stop_reason"] == "env_done"]
    assert len(lost) + len(kept) == 64
    assert 0 < len(lost) <= 32
    for episode in lost:
        assert episode["reward"] is None
        assert (episode["error_kind"], episode["retryable"]) == ("env", True)
    again = rollout(prompts(64))
    assert {episode["stop_reason"] for episode in again} == {"env_done"}
    assert pool.stats()[0].restarts == 1
