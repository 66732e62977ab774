"""All slots of a worker in one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twinkle_agentic.envs.openenv.pool import EnvPool

NOTHING: list[dict[str, Any]] = [{}]  # arguments of one step


def test_all_slots_of_a_worker_share_one_thread(
    make_pool: Callable[..., EnvPool], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pool = make_pool(6, slot_threads=False, env_kwargs={"log": str(log)})
    pool.reset_batch(range(6))
    pool.step_batch(range(6), ["add"] * 6, NOTHING * 6)
    pool.close()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len({(pid, thread) for pid, _, _, thread in lines}) == max(1, pool.num_workers)
    assert sum(verb == "closed" for _, _, verb, _ in lines) == 6


def test_environments_that_say_they_are_instant_share_one_thread(
    make_pool: Callable[..., EnvPool], tmp_path: Path
) -> None:
    for name, threads in (("InstantLab", 1), ("Lab", 6)):
        log = tmp_path / name
        env_factory = f"pool_test_envs:{name}"
        pool = make_pool(6, env_factory=env_factory, env_kwargs={"log": str(log)})
        pool.reset_batch(range(6))
        steps = pool.step_batch(range(6), ["add"] * 6, NOTHING * 6)
        assert [step.observation for step in steps] == ["step 1"] * 6
        pool.close()
        lines = [line.split() for line in log.read_text().splitlines()]
        assert len({(pid, thread) for pid, _, _, thread in lines}) == threads
        assert sum(verb == "made" for _, _, verb, _ in lines) == 6
        assert sum(verb == "closed" for _, _, verb, _ in lines) == 6


def test_results_and_failures_are_those_of_each_slot(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(4, slot_threads=False)
    pool.reset_batch(range(4))
    results = pool.step_batch(
        range(4), ["add", "fail", "add", "add"], [{}, {"message": "boom"}, {}, {}]
    )
    assert [r.error is None for r in results] == [True, False, True, True]
    assert pool.step(0, "add").observation == "step 2"
    assert pool.reset(1).observation == "ready []"


def test_hanging_slot_takes_its_neighbours_along_and_all_come_back(
    make_pool: Callable[..., EnvPool], gate: Any
) -> None:
    pool = make_pool(2, slot_threads=False, step_timeout_s=1.0, num_workers=0)
    pool.reset_batch(range(2))
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(pool.step, 0, "wait", {"gate": gate.path})
        gate.await_waiting(1)
        behind = threads.submit(pool.step, 1, "add")
        assert stuck.result(30).info["error_kind"] == "timeout"
        assert behind.result(30).info["error_kind"] == "timeout"
    assert "hangs in slot 0" in pool.step(1, "add").info["error"]
    assert [r.error for r in pool.reset_batch(range(2))] == [None, None]
    assert pool.step(1, "add").observation == "step 1"
    gate.open()


def test_reset_behind_a_hanging_slot_starts_once_that_is_given_up(
    make_pool: Callable[..., EnvPool], gate: Any
) -> None:
    pool = make_pool(2, slot_threads=False, step_timeout_s=0.5, num_workers=0)
    pool.reset_batch(range(2))
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(pool.step, 0, "wait", {"gate": gate.path})
        gate.await_waiting(1)
        assert pool.reset(1).observation == "ready []"
        assert stuck.result(30).info["error_kind"] == "timeout"
    gate.open()


def test_step_that_only_waited_loses_its_own_slot(
    make_pool: Callable[..., EnvPool], gate: Any
) -> None:
    pool = make_pool(2, slot_threads=False, step_timeout_s=0.5, num_workers=0)
    pool.reset(1)
    with ThreadPoolExecutor(1) as threads:
        slow_reset = threads.submit(pool.reset, 0, gate=gate.path)  # may take longer than a step
        gate.await_waiting(1)
        assert pool.step(1, "add").info["error_kind"] == "timeout"
        gate.open()
        assert "gate" in slow_reset.result(30).observation
    assert pool.step(0, "add").observation == "step 1"
    assert pool.reset(1).observation == "ready []"
