"""What a person sees of a run that is over: a table, and the figures of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["print_summary", "print_table", "trainable_turns", "unscored"]

_OTHER_COLUMNS = 6 + 5 + 11 + 7 + 6 * 3 + 1  # their widths, with the padding and rules of all six
_SHOWN_ERRORS = 5
_SHOWN_ROWS = 40  # a longer table scrolls off the screen; the file has all


def print_table(console: Console, trajectories: Sequence[Mapping[str, Any]]) -> None:
    """Print one line a trajectory: task, reward, turns, stop reason, seconds, error."""
    table = Table(title=f"{len(trajectories)} trajectories", title_justify="left")
    shown = trajectories[:_SHOWN_ROWS]
    # On a narrow screen the error gives way, then the name, never the figures.
    longest = max([len(str(row.get("id", ""))) for row in shown], default=0)
    room = console.width - _OTHER_COLUMNS - len("error")
    task_width = max(len("task"), min(24, longest, room))
    error_width = max(len("error"), console.width - task_width - _OTHER_COLUMNS)
    table.add_column("task", no_wrap=True, min_width=task_width, max_width=task_width)
    table.add_column("reward", justify="right", min_width=6, max_width=6)
    table.add_column("turns", justify="right", min_width=5, max_width=5)
    table.add_column("stop reason", no_wrap=True, min_width=11, max_width=11)
    table.add_column("seconds", justify="right", min_width=7, max_width=7)
    table.add_column("error", no_wrap=True, overflow="ellipsis", max_width=error_width)
    for row in shown:
        reward = row.get("reward")
        error = str(row.get("error") or "")
        table.add_row(
            escape(str(row.get("id", ""))),
            "[dim]none[/]" if reward is None else f"{reward:g}",
            str(row.get("turns", 0)),
            str(row.get("stop_reason")),
            f"{_seconds(row):.2f}",
            escape(error),
            style="red" if reward is None else None,
        )
    console.print(table)
    if len(trajectories) > _SHOWN_ROWS:
        console.print(f"... and {len(trajectories) - _SHOWN_ROWS} more in the file")


def print_summary(
    console: Console, trajectories: Sequence[Mapping[str, Any]], seconds: float
) -> None:
    """Print the figures of the whole run."""
    rewards = [row["reward"] for row in trajectories if row.get("reward") is not None]
    reasons = Counter(str(row.get("stop_reason")) for row in trajectories)
    turns = [int(row.get("turns", 0)) for row in trajectories]
    table = Table(show_header=False, box=None, pad_edge=False)
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "none"
    table.add_row("mean reward", f"{mean} over {len(rewards)} scored of {len(trajectories)}")
    if any("sample" in row for row in trajectories):
        table.add_row("tasks", _groups(trajectories))
    table.add_row("stop reasons", ", ".join(f"{k} {n}" for k, n in reasons.most_common()))
    table.add_row("turns", f"{sum(turns)} in all, median {median(turns):g}" if turns else "none")
    attempts = [int(row.get("attempts", 1)) for row in trajectories]
    if again := sum(count > 1 for count in attempts):
        table.add_row(
            "played again", f"{again} of {len(attempts)} episodes, {sum(attempts)} attempts in all"
        )
    failed = sum(len(row.get("failed_steps") or ()) for row in trajectories)
    # Where the env scores the whole, steps without a reward are as they should be.
    by_steps = [row for row in trajectories if row.get("eval_reward") is None]
    missing = sum(len(row.get("reward_missing_steps") or ()) for row in by_steps)
    if failed or missing:
        table.add_row("steps", f"{failed} failed, {missing} without a reward: each counts 0")
    trained, sampled = trainable_turns(trajectories)
    if sampled:
        table.add_row("tokens", f"{trained} of {sampled} turns can be trained on")
    table.add_row("wall time", f"{seconds:.2f} s")
    console.print(table)
    errors = Counter(str(row["error"]) for row in trajectories if row.get("error"))
    for text, count in errors.most_common(_SHOWN_ERRORS):
        console.print(f"[yellow]{count} x[/] {escape(text[:500])}", soft_wrap=True)


def unscored(trajectories: Sequence[Mapping[str, Any]]) -> int:
    """Return how many trajectories have no reward, for an infrastructure failure."""
    return sum(row.get("reward") is None for row in trajectories)


def trainable_turns(trajectories: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Return how many turns have tokens to train on, and how many should have some."""
    turns = [turn for row in trajectories for turn in row.get("token_turns") or ()]
    return sum(turn["problem"] is None for turn in turns), len(turns)


def _groups(trajectories: Sequence[Mapping[str, Any]]) -> str:
    """Say what the samples of each task have in common: equal ones teach a group nothing."""
    rewards: dict[str, list[float]] = {}
    for row in trajectories:
        group = rewards.setdefault(str(row.get("task")), [])
        if row.get("reward") is not None:
            group.append(row["reward"])
    positive = sum(any(reward > 0 for reward in group) for group in rewards.values())
    equal = sum(len(group) > 1 and len(set(group)) == 1 for group in rewards.values())
    return (
        f"{len(rewards)}: {positive} with a reward above 0 in some sample, {equal} with the same "
        "reward in all"
    )


def _seconds(row: Mapping[str, Any]) -> float:
    timing: Any = row.get("timing") or {}
    return float(timing.get("total", 0.0))
