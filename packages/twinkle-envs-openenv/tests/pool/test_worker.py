# The data of the tests is free-form JSON.
# pyright: reportUnknownMemberType=false, reportArgumentType=false
"""Messages that arrive at a worker in another order than they were sent."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from twinkle_agentic.envs.openenv.pool._messages import (
    Failure,
    SlotRequest,
    pack_requests,
    unpack_replies,
)
from twinkle_agentic.envs.openenv.pool._worker import PoolWorker


@pytest.fixture
def worker() -> Iterator[PoolWorker]:
    worker = PoolWorker(0, 4, pickle.dumps(("pool_test_envs:Lab", {})), True)
    yield worker
    assert worker.close(10) == 0


def reset(slot: int = 0, *, episode: int) -> SlotRequest:
    return SlotRequest("reset", slot, (None, False), 30.0, None, episode)


def step(slot: int = 0, *, episode: int) -> SlotRequest:
    return SlotRequest("step", slot, ("add", {}), 30.0, None, episode)


def ask(worker: PoolWorker, *requests: SlotRequest) -> list[Any]:
    return unpack_replies(worker.run(pack_requests(requests)))[1]


def test_calls_from_before_a_reset_are_rejected_alone(worker: PoolWorker) -> None:
    ask(worker, reset(0, episode=1), reset(1, episode=2))
    first, late = ask(worker, step(0, episode=1), step(1, episode=1))
    assert first.observation == "step 1"
    assert isinstance(late, Failure)
    assert "reset before this step" in late.text
    (late_reset,) = ask(worker, reset(1, episode=1))
    assert "reset before this reset" in late_reset.text
    assert ask(worker, step(1, episode=2))[0].observation == "step 1"


def test_busy_slot_holds_up_no_other_of_its_message(
    worker: PoolWorker, gate: Any, eventually: Callable[..., None]
) -> None:
    ask(worker, *(reset(slot, episode=1) for slot in range(4)))
    wait = SlotRequest("step", 0, ("wait", {"gate": gate.path}), 30.0, None, 1)
    worker.submit(pack_requests([wait]), lambda: None)
    gate.await_waiting(1)
    complete = threading.Event()
    steps = pack_requests([step(slot, episode=1) for slot in range(4)])
    batch = worker.submit(steps, complete.set)
    eventually(lambda: [position for position, _ in batch.unfinished()] == [0])
    gate.open()
    assert complete.wait(30)


def test_reset_may_be_sent_again(worker: PoolWorker) -> None:
    for _ in range(2):
        assert ask(worker, reset(episode=4))[0].observation == "ready []"
