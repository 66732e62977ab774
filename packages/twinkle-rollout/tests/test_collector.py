"""How often Python looks for cycles: less while a rollout runs, as before when it is over."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout.collector import rarer_collections
from twinkle_agentic.tools import ToolManager

DEFAULT = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Let each test start from the same thresholds, and leave those of the process."""
    before = gc.get_threshold()
    gc.set_threshold(*DEFAULT)
    yield
    gc.set_threshold(*before)


def test_a_rollout_raises_the_threshold_and_gives_it_back(api: Any, echo: ToolManager) -> None:
    seen: list[int] = []
    rollout = APIMultiTurnRollout(
        api("answer"), echo, on_done=lambda _: seen.append(gc.get_threshold()[0])
    )
    rollout([{"messages": [{"role": "user", "content": "Hello"}]}])
    assert [raised > DEFAULT[0] for raised in seen] == [True]
    assert gc.get_threshold() == DEFAULT


def test_the_last_of_several_rollouts_gives_it_back() -> None:
    with rarer_collections():
        with rarer_collections():
            raised = gc.get_threshold()
        assert gc.get_threshold() == raised != DEFAULT
    assert gc.get_threshold() == DEFAULT


def test_it_is_given_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="boom"), rarer_collections():
        raise ValueError("boom")
    assert gc.get_threshold() == DEFAULT


@pytest.mark.parametrize("own", [(0, 10, 10), (50_000, 5, 5)])
def test_what_the_user_chose_stays(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with rarer_collections():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_is_chosen_meanwhile_is_not_taken_back() -> None:
    with rarer_collections():
        gc.set_threshold(1_000, 11, 12)
    assert gc.get_threshold() == (1_000, 11, 12)


def test_a_forked_child_has_the_threshold_of_before() -> None:
    with rarer_collections():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if gc.get_threshold() == DEFAULT else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gc.get_threshold() == DEFAULT
