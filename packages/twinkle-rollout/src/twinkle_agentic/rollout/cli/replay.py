"""`replay` and `rescore`: play the trajectories of a run again, without a model, and compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twinkle_agentic.rollout.cli.environments import choose_env
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.replay import Replay, ReplayStatus, replay, rescore
from twinkle_agentic.rollout.report import Run, RunNotFoundError

__all__ = ["replay_run"]

_SHOWN = 20


def replay_run(
    console: Console,
    path: Path,
    *,
    env: str,
    base_urls: Sequence[str],
    ids: Sequence[str],
    concurrency: int,
    step_timeout_s: float,
    score_only: bool,
) -> int:
    """Play a run again and say what differs; return 1 where anything does, or could not be played.

    Raises:
        RefusedError: The run or the env cannot be used, or no trajectory has one of the ids.
    """
    try:
        run = Run.open(path)
        rows = [row for row in run.rows() if not ids or str(row.get("id")) in ids]
    except (RunNotFoundError, ValueError, OSError) as error:
        raise RefusedError(str(error)) from error
    if not rows:
        raise RefusedError(f"{run.file} has no trajectory {', '.join(ids)}".rstrip())
    choice = choose_env(env, base_urls=base_urls, message_timeout_s=step_timeout_s)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("scoring" if score_only else "replaying", total=len(rows))

        def advance(_: Replay) -> None:
            progress.advance(bar)

        if score_only:
            results = rescore(rows, choice.make, concurrency=concurrency, on_done=advance)
        else:
            results = replay(
                rows,
                choice.make,
                concurrency=concurrency,
                step_timeout_s=step_timeout_s,
                on_done=advance,
            )
    _print(console, results)
    bad = (ReplayStatus.DIFFERENT, ReplayStatus.FAILED)
    return 1 if any(result.status in bad for result in results) else 0


def _print(console: Console, results: Sequence[Replay]) -> None:
    counts = Counter(result.status for result in results)
    console.print(", ".join(f"{counts[status]} {status.value}" for status in ReplayStatus))
    told = [result for result in results if result.difference or result.error]
    for result in told[:_SHOWN]:
        text = str(result.difference or result.error)
        console.print(
            f"[yellow]{result.status.value}[/] {escape(result.id)}: {escape(text)}", soft_wrap=True
        )
    if len(told) > _SHOWN:
        console.print(f"... and {len(told) - _SHOWN} more")
