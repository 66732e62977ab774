# The data of the tests is free-form JSON.
# pyright: reportUnknownMemberType=false, reportArgumentType=false
"""The worker that many threads call at once, and what Ray lets through to it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from twinkle_agentic.envs.openenv.pool import EnvPool
from twinkle_agentic.envs.openenv.pool.thread_worker import ThreadWorker
from twinkle_agentic.envs.openenv.pool.wire import (
    Failure,
    SlotRequest,
    pack_request,
    unpack_reply,
)


@pytest.fixture
def worker() -> Iterator[ThreadWorker]:
    worker = ThreadWorker(0, 4, pickle.dumps(("pool_test_envs:Lab", {})), True)
    yield worker
    assert worker.close(10) == 0


def reset(slot: int = 0, episode: int = 1) -> SlotRequest:
    return SlotRequest("reset", slot, (None, False), 30.0, None, episode)


def step(
    tool: str = "add", *, slot: int = 0, episode: int = 1, timeout_s: float = 30.0, **arguments: Any
) -> SlotRequest:
    return SlotRequest("step", slot, (tool, arguments), timeout_s, None, episode)


def ask(worker: ThreadWorker, request: SlotRequest) -> Any:
    return unpack_reply(worker.call(pack_request(request)))[1]


def ask_all(worker: ThreadWorker, *requests: SlotRequest) -> list[Any]:
    replies: list[bytes] = pickle.loads(worker.batch(pack_request(list(requests))))
    return [unpack_reply(reply)[1] for reply in replies]


def test_step_that_a_reset_has_overtaken_is_refused(worker: ThreadWorker) -> None:
    ask(worker, reset(episode=2))
    late = ask(worker, step(episode=1))
    assert isinstance(late, Failure)
    assert "reset before this step" in late.text
    assert ask(worker, step(episode=2)).observation == "step 1"


def test_reset_that_a_later_one_has_overtaken_is_refused(worker: ThreadWorker) -> None:
    ask(worker, reset(episode=3))
    assert ask(worker, step(episode=3)).observation == "step 1"
    assert "reset before this reset" in ask(worker, reset(episode=2)).text
    assert ask(worker, step(episode=3)).observation == "step 2"


def test_overtaken_calls_of_a_batch_are_refused_alone(worker: ThreadWorker) -> None:
    ask_all(worker, reset(0, 1), reset(1, 2))
    first, second = ask_all(worker, step(slot=0, episode=1), step(slot=1, episode=1))
    assert first.observation == "step 1"
    assert isinstance(second, Failure)


def test_reset_may_be_sent_again(worker: ThreadWorker) -> None:
    for _ in range(2):
        assert ask(worker, reset(episode=4)).observation == "ready []"


def test_batch_of_nothing(worker: ThreadWorker) -> None:
    assert ask_all(worker) == []
    token, fresh = pickle.loads(worker.begin(pack_request([])))
    assert fresh == {}
    with pytest.raises(KeyError):
        worker.poll(token)


def test_batch_gives_up_on_the_slots_that_hang_alone(worker: ThreadWorker, gate: Any) -> None:
    ask_all(worker, *(reset(slot) for slot in range(3)))
    hangs = step("wait", slot=1, timeout_s=0.2, gate=gate.path)
    quick = [step(slot=slot, timeout_s=0.2) for slot in (0, 2)]
    first, stuck, last = ask_all(worker, quick[0], hangs, quick[1])
    assert (first.observation, last.observation) == ("step 1", "step 1")
    assert (stuck.kind, stuck.retryable) == ("timeout", True)
    assert pickle.loads(worker.stats())["lost"] == [1]
    assert ask(worker, step(slot=0)).observation == "step 2"
    gate.open()


def test_single_call_that_hangs_is_given_up(worker: ThreadWorker, gate: Any) -> None:
    ask(worker, reset())
    stuck = ask(worker, step("wait", timeout_s=0.2, gate=gate.path))
    assert stuck.kind == "timeout"
    assert ask(worker, reset(episode=2)).observation == "ready []"
    gate.open()


def test_batch_in_pieces_gives_each_reply_once(worker: ThreadWorker, gate: Any) -> None:
    ask_all(worker, *(reset(slot) for slot in range(4)))
    steps = [step(slot=slot) for slot in range(3)]
    steps.append(step("wait", slot=3, gate=gate.path))
    token, fresh = pickle.loads(worker.begin(pack_request(steps)))
    seen: list[int] = list(fresh)
    while len(seen) < 3:
        seen += pickle.loads(worker.poll(token))[1]
    assert sorted(seen) == [0, 1, 2]
    gate.await_waiting(1)
    gate.open()
    assert list(pickle.loads(worker.poll(token))[1]) == [3]
    with pytest.raises(KeyError):
        worker.poll(token)


def test_batch_in_pieces_is_bounded(worker: ThreadWorker, gate: Any) -> None:
    ask(worker, reset())
    hangs = step("wait", timeout_s=0.2, gate=gate.path)
    _, fresh = pickle.loads(worker.begin(pack_request([hangs])))
    assert unpack_reply(fresh[0])[1].kind == "timeout"
    gate.open()


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
