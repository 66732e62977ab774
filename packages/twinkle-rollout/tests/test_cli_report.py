"""The figures of a run: what counts 0 for want of a reward is said, and nothing else is."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from twinkle_agentic.rollout.cli.report import print_summary


def summary(**row: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, [{"reward": 0.0, "stop_reason": "stop", "turns": 2, **row}], 1.0)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_steps_without_a_reward_are_counted() -> None:
    assert "1 failed, 2 without a reward" in summary(
        reward_missing_steps=[0, 2], failed_steps=[1], eval_reward=None
    )


def test_steps_that_earn_nothing_because_the_whole_is_scored_are_no_news() -> None:
    text = summary(reward=1.0, reward_missing_steps=[0, 2], failed_steps=[], eval_reward=1.0)
    assert "without a reward" not in text
