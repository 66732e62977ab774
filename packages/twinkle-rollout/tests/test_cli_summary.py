"""The figures of a run: what counts 0 for want of a reward is said, and nothing else is."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from twinkle_agentic.rollout.cli.summary import print_summary, print_table


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


def table(width: int, *rows: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(
        console, [{"reward": 1.0, "stop_reason": "env_done", "turns": 12, **r} for r in rows]
    )
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_short_names_leave_room_for_the_heading() -> None:
    assert table(80, {"id": "1"}, {"id": "2"})[2].split("┃")[1].strip() == "task"


@pytest.mark.parametrize("width", [60, 72, 80])
def test_on_a_narrow_screen_names_and_errors_give_way_and_no_figure(width: int) -> None:
    error = "NotFoundError: there is nothing at this address"
    lines = table(width, {"id": "task-with-a-long-name/and-more", "reward": -0.25, "error": error})
    assert max(map(len, lines)) <= width
    heads = [cell.strip() for cell in lines[2].split("┃")[1:-1]]
    assert heads == ["task", "reward", "turns", "stop reason", "seconds", "error"]
    cells = [cell.strip() for cell in lines[4].split("│")[1:-1]]
    assert cells[1:5] == ["-0.25", "12", "env_done", "0.00"]
    assert cells[0].startswith("task-")


def test_a_name_with_brackets_is_shown_as_it_is() -> None:
    assert table(100, {"id": "a[/b]"})[4].split("│")[1].strip() == "a[/b]"


def test_groups_count_what_was_scored() -> None:
    console = Console(file=io.StringIO(), width=200)
    rewards = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, None], "d": [None, None]}
    samples = [(task, n, r) for task, group in rewards.items() for n, r in enumerate(group)]
    rows = [{"task": t, "sample": n, "reward": r, "stop_reason": "stop"} for t, n, r in samples]
    print_summary(console, rows, 1.0)
    assert isinstance(console.file, io.StringIO)
    expected = "4: 2 with a reward above 0 in some sample, 1 with the same reward in all"
    assert expected in console.file.getvalue()
