"""Histograms: every value in one bin, every bin labelled, readable without Unicode too."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console

from twinkle_agentic.rollout.cli.histogram import bins, print_histograms

OUTCOMES: list[dict[str, Any]] = [
    *[{"reward": 1.0, "turns": 2}] * 6,
    *[{"reward": 0.0, "turns": 6}] * 3,
]
UNSCORED: list[dict[str, Any]] = [{"reward": None, "turns": 0}]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([1.0, 0.0, 1.0], [("0", 1), ("1", 2)]),
        ([-0.5, 0.25], [("-0.5", 1), ("0.25", 1)]),
        ([float(n) for n in range(16)], [(f"{2 * n} to {2 * n + 1}", 2) for n in range(8)]),
        ([n / 10 for n in range(21)], [
            ("0 to 0.25", 3), ("0.25 to 0.5", 2), ("0.5 to 0.75", 3), ("0.75 to 1", 2),
            ("1 to 1.25", 3), ("1.25 to 1.5", 2), ("1.5 to 1.75", 3), ("1.75 to 2", 3),
        ]),
    ],
)  # fmt: skip
def test_what_falls_into_which_bin(values: list[float], expected: list[tuple[str, int]]) -> None:
    assert bins(values) == expected


@pytest.mark.parametrize("scale", [1e-320, 1e-9, 1.0, 1e308])
def test_no_value_is_lost_or_counted_twice(scale: float) -> None:
    draw = random.Random(7)
    values = [draw.uniform(-1, 1) * scale for _ in range(1000)]
    assert sum(count for _, count in bins(values)) == 1000
    assert len(bins(values)) <= 8


def test_neighbours_that_a_float_can_hardly_part_are_still_counted() -> None:
    values = [1.0 + n * 2.0**-52 for n in range(20)]
    assert sum(count for _, count in bins(values)) == 20


def printed(rows: list[dict[str, Any]], *, encoding: str = "utf-8", width: int = 100) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    print_histograms(Console(file=file, width=width), rows)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_rewards_and_turns_stand_side_by_side_and_unscored_ones_are_counted() -> None:
    text = printed([*OUTCOMES, *UNSCORED])
    first, *_ = text.splitlines()
    assert "rewards" in first
    assert "turns" in first
    (none,) = [line for line in text.splitlines() if "none" in line]
    assert none.split()[:3] == ["none", "█" * 4, "1"]
    assert "█" * 24 + "  6" in text


def test_a_narrow_console_stacks_them() -> None:
    lines = printed(OUTCOMES, width=50).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 50
    assert not any("rewards" in line and "turns" in line for line in lines)


def test_a_console_without_unicode_gets_plain_bars() -> None:
    text = printed(OUTCOMES, encoding="ascii")
    assert "#" * 24 + "  6" in text


def test_a_run_without_any_trajectory_prints_nothing() -> None:
    assert printed([]) == ""
