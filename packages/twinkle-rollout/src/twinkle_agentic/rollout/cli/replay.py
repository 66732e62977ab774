"""`replay`: play the trajectories of a run again, without a model, and compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twinkle_agentic.rollout.cli.environments import choose_env
from twinkle_agentic.rollout.cli.options import Concurrency, RunFolder, RunIds, seconds
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED, RefusedError

if TYPE_CHECKING:
    from twinkle_agentic.rollout.replay import Replay

__all__ = ["replay"]

_SHOWN = 20


def replay(
    console: Console,
    *,
    run: RunFolder,
    ids: RunIds = None,
    env: Annotated[str, typer.Option(help="As for `run`: what made the environments.")],
    base_url: Annotated[
        list[str] | None, typer.Option(help="The OpenEnv server.", envvar="OPENENV_BASE_URL")
    ] = None,
    concurrency: Concurrency = 64,
    step_timeout_s: Annotated[float, seconds("Seconds for one step.")] = 120.0,
    score_only: Annotated[
        bool, typer.Option("--score-only", help="Play no step: run `evaluate` alone.")
    ] = False,
) -> int:
    """Play the recorded actions again in fresh environments, without a model, and compare.

    Says for each trajectory whether observations, rewards and the end came out the same, and where
    not, at which step and what differed. Exit code 1 where anything differs or could not be played.
    """
    from twinkle_agentic.rollout import replay as engine
    from twinkle_agentic.rollout.report import Run

    try:
        recorded = Run.open(run)
        rows = [row for row in recorded.rows() if not ids or str(row.get("id")) in ids]
    except (ValueError, OSError) as error:
        raise RefusedError(str(error)) from error
    if not rows:
        raise RefusedError(f"{recorded.file} has no trajectory {', '.join(ids or ())}".rstrip())
    choice = choose_env(env, base_urls=base_url or (), message_timeout_s=step_timeout_s)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("scoring" if score_only else "replaying", total=len(rows))

        def advance(_: Replay) -> None:
            progress.advance(bar)

        if score_only:
            results = engine.rescore(rows, choice.make, concurrency=concurrency, on_done=advance)
        else:
            results = engine.replay(
                rows,
                choice.make,
                concurrency=concurrency,
                step_timeout_s=step_timeout_s,
                on_done=advance,
            )
    _print(console, results)
    bad = (engine.ReplayStatus.DIFFERENT, engine.ReplayStatus.FAILED)
    return EXIT_FAILED if any(result.status in bad for result in results) else 0


def _print(console: Console, results: Sequence[Replay]) -> None:
    from twinkle_agentic.rollout.replay import ReplayStatus

    counts = Counter(result.status for result in results)
    console.print(", ".join(f"{counts[status]} {status.value}" for status in ReplayStatus))
    notable = [result for result in results if result.difference or result.error]
    for result in notable[:_SHOWN]:
        text = str(result.difference or result.error)
        console.print(
            f"[yellow]{result.status.value}[/] {escape(result.id)}: {escape(text)}", soft_wrap=True
        )
    if len(notable) > _SHOWN:
        console.print(f"... and {len(notable) - _SHOWN} more")
