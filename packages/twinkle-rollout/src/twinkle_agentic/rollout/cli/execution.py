"""One run: tasks through the rollout into an output folder, with progress and a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from twinkle_agentic.envs.base import Env
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.progress import make_progress
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED
from twinkle_agentic.rollout.cli.summary import print_summary, print_table, unscored
from twinkle_agentic.tools.types import Trajectory

__all__ = ["execute"]


def execute(
    console: Console,
    *,
    tasks: Sequence[Trajectory],
    api: OpenAI,
    env_factory: Callable[[Trajectory], Env],
    output: RunOutput,
    **rollout_options: Any,
) -> int:
    """Roll out all tasks, write and show what came of them.

    Args:
        console: Where tables go, and the progress where it is a terminal (else to stderr).
        tasks: The trajectories to start from; those that `output` has kept are not run again.
        api: The model endpoint.
        env_factory: Makes the env of one trajectory.
        output: Entered.
        **rollout_options: As for `APIMultiTurnRollout`.

    Returns:
        The exit code: 0 where every trajectory has a reward and is written, else 1.
    """
    start = time.monotonic()
    left = output.left(tasks)
    if len(left) < len(tasks):
        kept = len(tasks) - len(left)
        console.print(f"{kept} of {len(tasks)} trajectories are kept from the earlier run")
    if output.warning is not None:
        _to_stderr(f"[yellow]warning:[/] {escape(output.warning)}")
    with make_progress(console, len(left)) as progress:

        def on_done(trajectory: Any) -> None:
            output.add(trajectory)
            progress.add(scored=trajectory.get("reward") is not None)

        rollout = APIMultiTurnRollout(
            api=api,
            env_factory=env_factory,
            trace_dir=str(output.traces),
            on_done=on_done,
            **rollout_options,
        )
        trajectories = output.whole(tasks, rollout(left))
    unwritten = _finish(output, trajectories)
    print_table(console, trajectories)
    print_summary(console, trajectories, time.monotonic() - start)
    if unwritten is None:
        console.print(
            f"trajectories: {output.path}\ntraces:       {output.traces}\n"
            f"look at them: twinkle-rollout report {output.folder} --open",
            soft_wrap=True,
            markup=False,
        )
    missing = unscored(trajectories)
    if missing:
        again = "; `run --resume` plays them again" if output.resumable else ""
        console.print(
            f"[yellow]{missing} of {len(trajectories)} trajectories have no reward: an "
            f"infrastructure failure is not a score of 0. The column `error` says why{again}.[/]"
        )
    if unwritten is not None:
        _to_stderr(f"[red]error:[/] {escape(unwritten)}")
    return EXIT_FAILED if missing or unwritten is not None else 0


def _to_stderr(line: str) -> None:
    Console(stderr=True, emoji=False).print(line, soft_wrap=True)


def _finish(output: RunOutput, trajectories: Sequence[Any]) -> str | None:
    """Write the results; return why they cannot be written, for what came of them can be shown."""
    try:
        output.finish(trajectories)
    except OSError as error:
        return (
            f"{output.path} cannot be written ({error.strerror}): the trajectories that could are "
            f"in {output.part}"
        )
    return None
