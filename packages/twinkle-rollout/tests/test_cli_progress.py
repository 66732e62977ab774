"""Progress where nobody watches: few lines, and one now and then whatever happens."""

from __future__ import annotations

import inspect
import threading

from twinkle_agentic.rollout.cli.progress import ProgressLines


def test_each_tenth_of_the_trajectories_is_one_line() -> None:
    lines: list[str] = []
    with ProgressLines(320, write=lines.append, interval_s=3600, gap_s=0) as progress:
        for number in range(320):
            progress.add(scored=number % 4 != 0)
    assert [int(line.split()[1]) for line in lines] == [*range(0, 321, 32)]
    assert lines[-1].startswith("progress: 320 of 320 episodes done, 240 scored, 80 failed, ")


def test_few_trajectories_are_a_line_each() -> None:
    lines: list[str] = []
    with ProgressLines(3, write=lines.append, interval_s=3600, gap_s=0) as progress:
        for _ in range(3):
            progress.add(scored=True)
    assert [int(line.split()[1]) for line in lines] == [0, 1, 2, 3]


def test_quick_trajectories_are_a_line_at_the_start_and_one_at_the_end() -> None:
    lines: list[str] = []
    with ProgressLines(10, write=lines.append, interval_s=3600, gap_s=3600) as progress:
        for _ in range(10):
            progress.add(scored=True)
    assert [int(line.split()[1]) for line in lines] == [0, 10]


def test_a_line_that_came_too_soon_comes_later() -> None:
    lines: list[str] = []
    late = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if line.startswith("progress: 2 of 8"):
            late.set()

    with ProgressLines(8, write=write, interval_s=3600, gap_s=0.2) as progress:
        progress.add(scored=True)
        progress.add(scored=True)
        assert late.wait(20)


def test_the_gap_is_two_seconds_by_default() -> None:
    assert inspect.signature(ProgressLines).parameters["gap_s"].default == 2.0


def test_a_run_in_which_nothing_ends_says_that_it_lives() -> None:
    lines: list[str] = []
    alive = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            alive.set()

    with ProgressLines(8, write=write, interval_s=0.01):
        assert alive.wait(20)
    assert all(line.startswith("progress: 0 of 8 episodes done") for line in lines)


def test_nothing_goes_on_after_the_end() -> None:
    with ProgressLines(8, write=lambda line: None, interval_s=0.001):
        assert "twinkle-progress" in [thread.name for thread in threading.enumerate()]
    assert "twinkle-progress" not in [thread.name for thread in threading.enumerate()]
