"""Histograms of a run in the terminal: rewards and turns."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.table import Table

__all__ = ["bins", "print_histograms"]

_BINS = 8
_BAR_WIDTH = 24


def print_histograms(console: Console, trajectories: Sequence[Mapping[str, Any]]) -> None:
    """Print how rewards and turns are spread, side by side where there is room.

    Args:
        console: One that cannot show block characters gets `#`.
        trajectories: Finished; those without a reward are counted as `none`.
    """
    if not trajectories:
        return
    given = [row.get("reward") for row in trajectories]
    rewards = bins([float(reward) for reward in given if reward is not None])
    if missing := given.count(None):
        rewards.append(("none", missing))
    turns = bins([float(row.get("turns", 0)) for row in trajectories])
    block = "#" if console.options.ascii_only else "█"
    parts = [_table("rewards", rewards, block), _table("turns", turns, block)]
    console.print(Columns(parts, padding=(0, 4)))


def bins(values: Sequence[float]) -> list[tuple[str, int]]:
    """Count values: one bin for each where there are few, else bins of equal width.

    Args:
        values: Finite.

    Returns:
        Label and count of each bin, in rising order; at most 8. A value on the border of two is in
        the upper one.
    """
    counts = Counter(values)
    if len(counts) <= _BINS:
        return [(f"{value:g}", counts[value]) for value in sorted(counts)]
    low, high = min(counts), max(counts)
    if all(value.is_integer() for value in counts) and high - low < 2**53:
        return _whole_bins(counts, int(low), int(high))
    # Weighted ends, not steps from one of them: the width itself may be too large for a float.
    edges = [low * (1 - part / _BINS) + high * (part / _BINS) for part in range(1, _BINS)]
    tally = Counter[int]()
    for value, count in counts.items():
        tally[bisect_right(edges, value)] += count
    ends = [low, *edges, high]
    return [(f"{ends[n]:.3g} to {ends[n + 1]:.3g}", tally[n]) for n in range(_BINS)]


def _whole_bins(counts: Counter[float], low: int, high: int) -> list[tuple[str, int]]:
    """Count whole numbers in bins that hold the same number of them, the last one maybe fewer."""
    width = math.ceil((high - low + 1) / _BINS)
    tally = Counter[int]()
    for value, count in counts.items():
        tally[(int(value) - low) // width] += count
    starts = range(low, high + 1, width)
    spans = [(start, min(start + width - 1, high)) for start in starts]
    labels = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans]
    return [(label, tally[n]) for n, label in enumerate(labels)]


def _table(title: str, rows: Sequence[tuple[str, int]], block: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    most = max(count for _, count in rows)
    for label, count in rows:
        table.add_row(label, block * math.ceil(count * _BAR_WIDTH / most), str(count))
    return table
