from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.errors import EnvError, EnvTimeoutError, PoolError
from twinkle_agentic.envs.openenv.pool import EnvPool

NOTHING: list[dict[str, Any]] = [{}]  # arguments of one step


def _name(tool: Any) -> str:
    return tool["function"]["name"]


def test_reset_passes_trajectory_seed_and_kwargs(pool: EnvPool) -> None:
    trajectory: Any = {"messages": [], "user_data": {"level": 2, "seed": 1}}
    result = pool.reset(0, trajectory, seed=9, player="x")
    seen = [("level", 2), ("player", "x"), ("reset_kwargs", {"player": "x"}), ("seed", 9)]
    assert result.observation == f"ready {seen}"
    assert trajectory["user_data"] == {"level": 2, "seed": 1}


def test_reset_kwargs_that_the_environment_cannot_take_are_an_error(
    word_game_package: str,
) -> None:
    pytest.importorskip("openenv", reason="it comes with the embedded extra")
    labels: Any = {"user_data": {"answer": "for the grader"}}
    with EnvPool(2, env_kwargs={"env_name": word_game_package, "reset_keys": []}) as pool:
        assert pool.reset(0, labels, difficulty="easy").error is None
        with pytest.raises(EnvError, match="has no setting 'level_of'"):
            pool.reset(0, labels, level_of="easy")
        results = pool.reset_batch([0, 1], level_of="easy")
    assert ["has no setting 'level_of'" in (r.error or "") for r in results] == [True, True]


def test_reset_takes_user_data_as_pairs(pool: EnvPool) -> None:
    trajectory: Any = {"user_data": [("level", "3")]}
    assert pool.reset(0, trajectory).observation == "ready [('level', 3)]"
    assert pool.reset(0, trajectory, seed=5).observation == "ready [('level', 3), ('seed', 5)]"


def test_step_returns_what_the_environment_gave(pool: EnvPool) -> None:
    pool.reset(5)
    first = pool.step(5, "add", {"reward": 0.5})
    second = pool.step(5, "add", {"reward": 2, "done": True})
    assert (first.observation, first.reward, first.done) == ("step 1", 0.5, False)
    assert (second.observation, second.reward, second.done) == ("step 2", 2.0, True)
    assert second.info == {"episode_reward": 2.5}


def test_episode_reward_starts_anew_with_reset(pool: EnvPool) -> None:
    for _ in range(2):
        pool.reset(1)
        assert pool.step(1, "add").info["episode_reward"] == 1.0


def test_slots_have_environments_of_their_own(pool: EnvPool) -> None:
    pool.reset_batch(range(8))
    pool.step(2, "add")
    assert pool.step(2, "add").observation == "step 2"
    assert pool.step(3, "add").observation == "step 1"


def test_batch_results_come_in_the_order_of_indices(pool: EnvPool) -> None:
    indices = [6, 0, 5, 3, 1]
    resets = pool.reset_batch(indices, seeds=[60, 0, 50, 30, 10])
    assert [r.observation for r in resets] == [
        f"ready [('seed', {s})]" for s in (60, 0, 50, 30, 10)
    ]
    texts = [f"slot {slot}" for slot in indices]
    steps = pool.step_batch(indices, ["echo"] * 5, [{"text": text} for text in texts])
    assert [step.observation for step in steps] == texts


def test_reset_batch_takes_one_trajectory_per_slot(pool: EnvPool) -> None:
    trajectories: Any = [{"user_data": {"task": "a"}}, None]
    results = pool.reset_batch([7, 4], trajectories, mode="fast")
    assert [r.observation for r in results] == [
        "ready [('mode', 'fast'), ('reset_kwargs', {'mode': 'fast'}), ('task', 'a')]",
        "ready [('mode', 'fast'), ('reset_kwargs', {'mode': 'fast'})]",
    ]


def test_empty_batch_is_empty(pool: EnvPool) -> None:
    assert pool.step_batch([], [], []) == []
    assert pool.reset_batch([]) == []
    assert pool.step_batch([], [], [], min_results=0) == []


@pytest.mark.parametrize("slot", [-1, 8, 1_000])
def test_unknown_slot_is_an_index_error(pool: EnvPool, slot: int) -> None:
    for call in (
        lambda: pool.reset(slot),
        lambda: pool.step(slot, "add"),
        lambda: pool.reset_batch([0, slot]),
        lambda: pool.step_batch([slot], ["add"], NOTHING),
    ):
        with pytest.raises(IndexError, match=rf"slot {slot} is outside this pool: pool_size=8"):
            call()


def test_slot_that_is_no_integer_is_refused(pool: EnvPool) -> None:
    with pytest.raises(TypeError):
        pool.step(1.5, "add")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_duplicate_indices_are_refused(pool: EnvPool) -> None:
    with pytest.raises(ValueError, match=r"each slot once, found \[2\]"):
        pool.step_batch([2, 1, 2], ["add"] * 3, NOTHING * 3)
    with pytest.raises(ValueError, match=r"found \[3, 4\]"):
        pool.reset_batch([3, 4, 4, 3])


def test_lists_of_unequal_length_are_refused(pool: EnvPool) -> None:
    with pytest.raises(ValueError, match="tool_names has 1 entries for 2 indices"):
        pool.step_batch([0, 1], ["add"], NOTHING * 2)
    with pytest.raises(ValueError, match="arguments_list has 3 entries for 2 indices"):
        pool.step_batch([0, 1], ["add", "add"], NOTHING * 3)
    with pytest.raises(ValueError, match="seeds has 1 entries for 2 indices"):
        pool.reset_batch([0, 1], seeds=[1])
    with pytest.raises(ValueError, match="the text 'add'"):
        pool.step_batch([0, 1, 2], "add", NOTHING * 3)


def test_step_before_reset_says_so(make_pool: Callable[..., EnvPool]) -> None:
    result = make_pool(2).step(1, "add")
    assert result.done
    assert "no episode is running" in result.info["error"]


def test_failing_reset_raises_and_the_next_one_works(pool: EnvPool) -> None:
    with pytest.raises(EnvError, match="slot 2: reset: ValueError: this task is refused"):
        pool.reset(2, refuse=True)
    assert "this task is refused" in pool.step(2, "add").info["error"]
    assert pool.reset(2).observation == "ready []"
    assert pool.step(2, "add").error is None


def test_failing_reset_in_a_batch_fails_alone(pool: EnvPool) -> None:
    trajectories: Any = [{}, {"user_data": {"refuse": True}}, {}, {}]
    results = pool.reset_batch([0, 1, 2, 6], trajectories)
    assert [r.error is None for r in results] == [True, False, True, True]
    assert results[1].done
    assert results[1].info["error_kind"] == "env"


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("fail", {"message": "boom"}, "RuntimeError: boom"),
        ("fail_oddly", {}, "OddError: odd error 7: nobody can unpickle me"),
        ("fail_hard", {}, "SystemExit: 4"),
        ("nonsense", {}, "must return a StepResult"),
        ("no_such_tool", {}, "do_no_such_tool"),
    ],
)
def test_exception_concerns_its_slot_only(
    pool: EnvPool, tool: str, arguments: dict[str, Any], said: str
) -> None:
    pool.reset_batch(range(4))
    results = pool.step_batch([0, 1, 2, 3], ["add", tool, "add", "add"], [{}, arguments, {}, {}])
    assert [r.error is None for r in results] == [True, False, True, True]
    assert results[1].done
    assert said in results[1].info["error"]
    assert results[1].info["error_kind"] == "env"
    assert "slot 1" in results[1].info["error"]
    again = pool.step(1, "add")
    assert again.done
    assert said in again.info["error"]
    assert pool.step(0, "add").observation == "step 2"
    pool.reset(1)
    assert pool.step(1, "add").observation == "step 1"


def test_reward_that_is_no_number_is_flagged(pool: EnvPool) -> None:
    pool.reset(0)
    pool.step(0, "add")
    result = pool.step(0, "nan")
    assert result.reward == 0.0
    assert "not a finite number" in result.info["error"]
    assert result.info["episode_reward"] == 1.0


def test_objects_in_info_arrive_as_plain_data(pool: EnvPool) -> None:
    pool.reset(0)
    info = pool.step(0, "objects").info
    assert info["point"] == {"x": 1, "y": 2}
    assert info["colour"] == "red"
    assert info["list"] == [{"x": 3, "y": 4}]
    assert info["plain"] == {"a": [1, None, "x"]}
    assert "Point" in info["class"]
    assert "lock" in info["lock"]


def test_arguments_that_do_not_pickle_are_refused_and_nothing_runs(pool: EnvPool) -> None:
    pool.reset_batch([0, 1])
    with pytest.raises(TypeError, match="cannot be sent to the worker"):
        pool.step_batch([0, 1], ["add", "echo"], [{}, {"text": threading.Lock()}])
    assert pool.step(0, "add").observation == "step 1"


def test_text_of_any_kind_arrives_unchanged(pool: EnvPool) -> None:
    pool.reset(0)
    for text in ("", "棋类 ♟", "nul \x00", "x" * 3_000_000):
        assert pool.step(0, "echo", {"text": text}).observation == text
    lone = pool.step(0, "echo", {"text": "lone \ud800 surrogate"})
    assert lone.observation == "lone \ufffd surrogate"  # no encoder takes it, as everywhere


def test_environment_is_made_used_and_closed_in_one_thread(
    make_pool: Callable[..., EnvPool], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    pool = make_pool(4, env_kwargs={"log": str(log)})
    for _ in range(2):
        pool.reset_batch(range(4))
        pool.step_batch(range(4), ["add"] * 4, NOTHING * 4)
    pool.close()
    threads: dict[str, set[str]] = {}
    verbs: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        pid, env, verb, thread = line.split()
        threads.setdefault(f"{pid} {env}", set()).add(thread)
        verbs.setdefault(f"{pid} {env}", []).append(verb)
    assert len(threads) == 4
    assert all(len(used) == 1 for used in threads.values())
    assert all(v == ["made", "reset", "step", "reset", "step", "closed"] for v in verbs.values())


def test_slow_slot_does_not_hold_up_its_neighbours(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch(range(8))
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(pool.step, 0, "wait", {"gate": gate.path})
        gate.await_waiting(1)
        assert pool.step(1, "add").observation == "step 1"
        assert all(r.error is None for r in pool.step_batch([1, 2, 3], ["add"] * 3, NOTHING * 3))
        assert not slow.done()
        gate.open()
        assert slow.result(30).observation == "passed"


def test_slots_of_a_batch_run_side_by_side(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch(range(8))
    with ThreadPoolExecutor(1) as threads:
        batch = threads.submit(pool.step_batch, range(8), ["wait"] * 8, [{"gate": gate.path}] * 8)
        gate.await_waiting(8)  # all of them, before any has finished
        gate.open()
        assert [r.observation for r in batch.result(30)] == ["passed"] * 8


def test_step_timeout_frees_the_caller_and_loses_the_slot(
    make_pool: Callable[..., EnvPool], gate: Any
) -> None:
    pool = make_pool(4, step_timeout_s=0.5)
    pool.reset_batch(range(4))
    results = pool.step_batch(
        range(4), ["wait", "add", "add", "add"], [{"gate": gate.path}, {}, {}, {}]
    )
    assert [r.error is None for r in results] == [False, True, True, True]
    assert results[0].done
    assert results[0].info["error_kind"] == "timeout"
    assert results[0].info["retryable"] is True
    assert "within 0.5 s" in results[0].info["error"]
    assert pool.step(0, "add").info["error_kind"] == "timeout"
    assert pool.stats()[0].lost == 1
    assert pool.stats()[0].abandoned == 1
    assert pool.reset(0).observation == "ready []"
    assert pool.step(0, "add").observation == "step 1"
    gate.open()


def test_abandoned_environment_is_closed_once_it_returns(
    make_pool: Callable[..., EnvPool],
    gate: Any,
    tmp_path: Path,
    eventually: Callable[..., None],
) -> None:
    log = tmp_path / "log"
    pool = make_pool(1, step_timeout_s=0.3, env_kwargs={"log": str(log)})
    pool.reset(0)
    assert pool.step(0, "wait", {"gate": gate.path}).info["error_kind"] == "timeout"
    assert "closed" not in log.read_text()
    gate.open()
    eventually(lambda: "closed" in log.read_text(), "the environment is closed")
    eventually(lambda: pool.stats()[0].abandoned == 0, "its thread has ended")


def test_reset_timeout_raises(make_pool: Callable[..., EnvPool], gate: Any) -> None:
    pool = make_pool(2, reset_timeout_s=0.5)
    with pytest.raises(EnvTimeoutError, match=r"reset gave no answer within 0\.5 s"):
        pool.reset(0, gate=gate.path)
    assert pool.reset(0).observation == "ready []"
    gate.open()


def test_calls_queued_behind_a_lost_one_are_lost_too(
    make_pool: Callable[..., EnvPool], gate: Any
) -> None:
    pool = make_pool(1, step_timeout_s=1.0)
    pool.reset(0)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pool.step, 0, "wait", {"gate": gate.path})
        gate.await_waiting(1)
        second = threads.submit(pool.step, 0, "add")
        assert first.result(30).info["error_kind"] == "timeout"
        assert second.result(30).info["error_kind"] == "timeout"
    gate.open()


def test_min_results_returns_the_first_and_collect_the_others(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch(range(8))
    tools = ["wait" if slot in (1, 6) else "add" for slot in range(8)]
    arguments: list[Any] = [{"gate": gate.path} if tool == "wait" else {} for tool in tools]
    results = pool.step_batch(range(8), tools, arguments, min_results=6)
    assert [slot for slot, r in enumerate(results) if r is None] == [1, 6]
    assert all(r.observation == "step 1" for r in results if r is not None)
    assert pool.collect(0) == {}
    with pytest.raises(PoolError, match=r"slot 6 has a step .* not collected"):
        pool.step(6, "add")
    assert pool.step(0, "add").observation == "step 2"
    gate.await_waiting(2)
    gate.open()
    late = pool.collect(timeout_s=30)
    assert sorted(late) == [1, 6]
    assert {r.observation for r in late.values()} == {"passed"}
    assert pool.collect() == {}
    assert pool.step(6, "add").observation == "step 2"


def test_collect_stops_waiting_at_its_limit(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch([0, 1])
    pool.step_batch([0, 1], ["wait", "add"], [{"gate": gate.path}, {}], min_results=1)
    gate.await_waiting(1)
    assert 0 not in pool.collect(timeout_s=0.2)
    gate.open()
    assert pool.collect(1, timeout_s=30)[0].observation == "passed"


def test_reset_drops_a_result_that_was_not_collected(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch([0, 1])
    pool.step_batch([0, 1], ["wait", "add"], [{"gate": gate.path}, {}], min_results=1)
    gate.await_waiting(1)
    with ThreadPoolExecutor(1) as threads:
        reset = threads.submit(pool.reset, 0)
        gate.open()
        assert reset.result(30).observation == "ready []"
    assert 0 not in pool.collect(timeout_s=30)
    assert pool.step(0, "add").observation == "step 1"


def test_reset_does_not_wait_for_what_hangs_in_its_slot(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch([0, 1])
    pool.step_batch([0, 1], ["wait", "add"], [{"gate": gate.path}, {}], min_results=1)
    gate.await_waiting(1)
    with ThreadPoolExecutor(1) as threads:
        reset = threads.submit(pool.reset, 0)
        try:
            assert reset.result(60).observation == "ready []"
        finally:
            gate.open()
    assert pool.step(0, "add").observation == "step 1"
    assert pool.step(1, "add").observation == "step 2"


def test_min_results_out_of_range_is_refused(pool: EnvPool) -> None:
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"min_results={wrong}"):
            pool.step_batch([0, 1], ["add"] * 2, NOTHING * 2, min_results=wrong)


async def test_async_twins_do_the_same(pool: EnvPool) -> None:
    assert (await pool.areset(0, seed=3)).observation == "ready [('seed', 3)]"
    assert (await pool.astep(0, "add", {"reward": 2.0})).reward == 2.0
    assert len(await pool.areset_batch(range(8))) == 8
    results = await asyncio.gather(*(pool.astep(slot, "add") for slot in range(8)))
    assert [r.observation for r in results] == ["step 1"] * 8
    batch = await pool.astep_batch([3, 1], ["add"] * 2, NOTHING * 2)
    assert [r.observation for r in batch] == ["step 2"] * 2
    first = await pool.astep_batch([3, 1], ["add"] * 2, NOTHING * 2, min_results=1)
    late = await pool.acollect()
    assert sum(r is not None for r in first) + len(late) == 2
    with pytest.raises(EnvError):
        await pool.areset(0, refuse=True)
    assert sum(w.slots for w in await pool.astats()) == 8


async def test_cancelled_step_leaves_the_slot_lost(pool: EnvPool, gate: Any) -> None:
    await pool.areset(0)
    step = asyncio.create_task(pool.astep(0, "wait", {"gate": gate.path}))
    await asyncio.to_thread(gate.await_waiting, 1)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    result = await pool.astep(0, "add")
    assert result.done
    assert "gave up on a running step" in result.info["error"]
    gate.open()
    assert (await pool.areset(0)).observation == "ready []"


def test_interrupted_batch_leaves_no_slot_in_an_unknown_state(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch(range(8))

    def interrupt() -> None:
        gate.await_waiting(2)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        interrupter = threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.step_batch([0, 7], ["wait"] * 2, [{"gate": gate.path}] * 2)
        interrupter.result(30)
    for slot in (0, 7):
        assert "gave up on a running step" in pool.step(slot, "add").info["error"]
    gate.open()
    assert all(r.error is None for r in pool.reset_batch([0, 7]))


def test_many_threads_step_their_slots(pool: EnvPool) -> None:
    pool.reset_batch(range(8))

    def play(slot: int) -> list[str]:
        return [pool.step(slot, "echo", {"text": f"{slot}.{i}"}).observation for i in range(25)]

    with ThreadPoolExecutor(8) as threads:
        heard = list(threads.map(play, range(8)))
    assert heard == [[f"{slot}.{i}" for i in range(25)] for slot in range(8)]


def test_evaluate_and_tools_reach_the_environment(pool: EnvPool) -> None:
    pool.reset(3, tool="after")
    trajectories: Any = [{"messages": [1, 2]}, {"messages": []}]
    assert pool.evaluate(3, trajectories, bonus=10) == [12.0, 10.0]
    assert _name(pool.tools(3)[0]) == "after"
    assert _name(pool.tools()[0]) == "before"
    with pytest.raises(EnvError, match="slot 3: evaluate: KeyError"):
        pool.evaluate(3, [{}])


def test_stats_tell_slots_steps_and_times(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(5)
    pool.reset_batch(range(5))
    pool.step_batch(range(5), ["add"] * 5, NOTHING * 5)
    stats = pool.stats()
    assert sum(w.slots for w in stats) == 5
    assert sum(w.steps for w in stats) == 5
    assert [(w.start, w.end) for w in stats] in ([(0, 3), (3, 5)], [(0, 5)])
    for worker in stats:
        assert worker.alive
        assert (worker.busy, worker.lost, worker.restarts, worker.abandoned) == (0, 0, 0, 0)
        assert worker.step_p50_ms is not None and worker.step_p99_ms is not None
        assert 0 < worker.step_p50_ms <= worker.step_p99_ms


def test_busy_counts_calls_that_run(pool: EnvPool, gate: Any) -> None:
    pool.reset_batch(range(8))
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.step, 0, "wait", {"gate": gate.path})
        gate.await_waiting(1)
        assert pool.stats()[0].busy == 1
        gate.open()
        call.result(30)
    assert pool.stats()[0].busy == 0


def test_closed_pool_refuses_everything(make_pool: Callable[..., EnvPool]) -> None:
    pool = make_pool(2)
    (adapter,) = pool.get_adapters(1)
    pool.reset(0)
    pool.close()
    pool.close()
    for call in (
        lambda: pool.step(0, "add"),
        lambda: pool.reset(0),
        pool.stats,
        pool.lease,
    ):
        with pytest.raises(PoolError, match="closed"):
            call()
    result = adapter.step("add")
    assert result.done
    assert "closed" in result.info["error"]


def test_close_is_bounded_by_its_limit(make_pool: Callable[..., EnvPool], gate: Any) -> None:
    pool = make_pool(2, close_timeout_s=0.3)
    pool.reset(0)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(pool.step, 0, "wait", {"gate": gate.path})
        gate.await_waiting(1)
        pool.close()
        gate.open()
        call.result(30)


async def test_async_context_manager_closes(num_workers: int) -> None:
    async with EnvPool(2, env_factory="pool_test_envs:Lab", num_workers=num_workers) as pool:
        await pool.areset(0)
    with pytest.raises(PoolError, match="closed"):
        await pool.astep(0, "add")


def test_batch_of_nothing(pool: EnvPool) -> None:
    assert pool.reset_batch([]) == []
    assert pool.step_batch([], [], []) == []
    assert pool.step_batch([], [], [], min_results=0) == []


def test_result_that_the_environment_returns_again_is_rewarded_again(pool: EnvPool) -> None:
    pool.reset(0)
    returns = [pool.step(0, "same").info["episode_reward"] for _ in range(3)]
    assert returns == [1.0, 2.0, 3.0]


def test_stats_get_through_while_all_threads_of_ray_wait(cluster: Any, gate: Any) -> None:
    options = {"max_concurrency": 2, "concurrency_groups": {"other": 1}}
    with (
        EnvPool(2, env_factory="pool_test_envs:Lab", num_workers=1, worker_options=options) as pool,
        ThreadPoolExecutor(2) as threads,
    ):
        pool.reset_batch(range(2))
        calls = [threads.submit(pool.step, slot, "wait", {"gate": gate.path}) for slot in range(2)]
        gate.await_waiting(2)
        (stats,) = pool.stats()
        assert (stats.alive, stats.busy) == (True, 2)
        gate.open()
        assert [call.result(30).observation for call in calls] == ["passed"] * 2
