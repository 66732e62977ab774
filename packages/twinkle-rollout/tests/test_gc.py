"""How often Python looks for cycles: less while a rollout runs, as before when it is over."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.rollout._gc import raised_gc_threshold
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
    with raised_gc_threshold():
        with raised_gc_threshold():
            raised = gc.get_threshold()
        assert gc.get_threshold() == raised != DEFAULT
    assert gc.get_threshold() == DEFAULT


def test_it_is_given_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="boom"), raised_gc_threshold():
        raise ValueError("boom")
    assert gc.get_threshold() == DEFAULT


@pytest.mark.parametrize("own", [(0, 10, 10), (500_000, 5, 5)])
def test_what_the_user_chose_stays(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with raised_gc_threshold():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_what_is_chosen_meanwhile_is_not_taken_back() -> None:
    with raised_gc_threshold():
        gc.set_threshold(1_000, 11, 12)
    assert gc.get_threshold() == (1_000, 11, 12)
