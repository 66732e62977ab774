# The data of the tests is free-form JSON.
# pyright: reportUnknownMemberType=false, reportArgumentType=false
"""What arrives late belongs to the episode it was asked in, and to no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from twinkle_agentic._aio.loop import background_loop, run_sync
from twinkle_agentic.envs.openenv.pool import EnvPool


def test_step_that_fails_after_the_reset_that_dropped_it(gate: Any) -> None:
    with EnvPool(2, env_factory="pool_test_envs:Lab") as pool, ThreadPoolExecutor(1) as threads:
        pool.reset_batch([0, 1])
        tools, arguments = ["wait_and_fail", "add"], [{"gate": gate.path}, {}]
        assert pool.step_batch([0, 1], tools, arguments, min_results=1)[0] is None
        gate.await_waiting(1)
        held = ThreadPoolExecutor(1).submit(run_sync, _hold_loop(threads, pool, gate))
        held.result(30)
        for _ in range(20):  # turns of the loop in which the old reply comes in
            run_sync(_one_turn())
        assert pool.step(0, "add").observation == "step 1"


async def _hold_loop(threads: ThreadPoolExecutor, pool: EnvPool, gate: Any) -> None:
    """Keep the background loop, on which the old reply arrives, until the slot is reset."""
    assert background_loop().is_running()
    reset = threads.submit(pool.reset, 0)
    gate.open()
    assert reset.result(20).observation == "ready []"


async def _one_turn() -> None:
    return None


@pytest.mark.parametrize(
    ("tool", "observation", "episode_reward", "error"),
    [
        ("none", "", 1.0, None),
        ("nan_return", "seen", 0.0, "gave the episode_reward nan"),
        ("text_done", "seen", 1.0, None),
    ],
)
def test_results_are_put_right_as_everywhere(
    pool: EnvPool, tool: str, observation: str, episode_reward: float, error: str | None
) -> None:
    pool.reset(0)
    result = pool.step(0, tool)
    assert (result.observation, result.info["episode_reward"]) == (observation, episode_reward)
    assert (error is None) == (result.error is None)
    assert error is None or error in result.info["error"]


@pytest.mark.parametrize("factory", ["AsyncScorer", "NamedEnv"])
def test_own_evaluate_is_used_however_it_is_written(factory: str) -> None:
    with EnvPool(1, env_factory=f"pool_test_envs:{factory}") as pool:
        (env,) = pool.get_adapters(1)
        env.reset()
        assert env.evaluate([{"messages": []}, {"messages": []}]) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_timeout_s", float("inf")),
        ("reset_timeout_s", float("nan")),
        ("lease_timeout_s", 0),
        ("start_timeout_s", True),
        ("close_timeout_s", None),
    ],
)
def test_limits_that_bound_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, found"):
        EnvPool(1, env_factory="pool_test_envs:Lab", **{name: value})


async def test_limits_of_calls_are_checked_as_well(pool: EnvPool) -> None:
    for limit in (float("inf"), float("nan"), -1):
        with pytest.raises(ValueError, match="timeout_s must be at least 0 or None, found"):
            pool.lease(timeout_s=limit)
        with pytest.raises(ValueError, match="timeout_s must be at least 0 or None, found"):
            await pool.alease(timeout_s=limit)
        with pytest.raises(ValueError, match="timeout_s must be at least 0 or None, found"):
            await pool.acollect(timeout_s=limit)
