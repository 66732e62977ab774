"""One run: tasks through the rollout into an output folder, with progress and a table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from twinkle_agentic.envs.base import Env
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.cli.guards import SameFailures, Servers, StoppedError, defect_of
from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.progress import make_progress
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED
from twinkle_agentic.rollout.cli.summary import (
    print_summary,
    print_table,
    trainable_turns,
    unscored,
)
from twinkle_agentic.tools.types import Trajectory

__all__ = ["execute"]

_MAX_PLAYED = 3  # how often an episode is played whose server went away


def execute(
    console: Console,
    *,
    tasks: Sequence[Trajectory],
    api: OpenAI,
    env_factory: Callable[[Trajectory], Env],
    output: RunOutput,
    servers: Servers | None = None,
    max_same_failures: int = 0,
    **rollout_options: Any,
) -> int:
    """Roll out all tasks, write and show what came of them.

    Args:
        console: Where tables go, and the progress where it is a terminal (else to stderr).
        tasks: The trajectories to start from; those that `output` has kept are not run again.
        api: The model endpoint.
        env_factory: Makes the env of one trajectory.
        output: Entered.
        servers: Waited for where they go away.
        max_same_failures: As for `SameFailures`.
        **rollout_options: As for `APIMultiTurnRollout`.

    Returns:
        The exit code: 0 where every trajectory has a reward (and where asked for tokens that can be
        trained on) and is written, else 1.
    """
    start = time.monotonic()
    left = output.left(tasks)
    if len(left) < len(tasks):
        kept = len(tasks) - len(left)
        console.print(f"{kept} of {len(tasks)} trajectories are kept from the earlier run")
    if output.warning is not None:
        _to_stderr(f"[yellow]warning:[/] {escape(output.warning)}")
    rollout = APIMultiTurnRollout(
        api=api, env_factory=env_factory, trace_dir=str(output.traces), **rollout_options
    )
    stopped: str | None = None
    fresh: dict[str, Any] = {}
    with make_progress(console, len(left)) as progress:
        try:
            for row in _finished(rollout, left, output, servers, max_same_failures):
                fresh[str(row["id"])] = row
                progress.add(scored=row.get("reward") is not None)
        except StoppedError as error:
            stopped = str(error)
    trajectories = [row for task in tasks if (row := output.result(task, fresh)) is not None]
    unwritten = None if stopped else _write(output, trajectories)
    print_table(console, trajectories)
    print_summary(console, trajectories, time.monotonic() - start)
    missing = unscored(trajectories)
    if missing and not stopped:
        again = "; `run --resume` plays them again" if output.resumable else ""
        console.print(
            f"[yellow]{missing} of {len(trajectories)} trajectories have no reward: an "
            f"infrastructure failure is not a score of 0. The column `error` says why{again}.[/]"
        )
    defects = [text for row in trajectories if (text := defect_of(row)) is not None]
    if defects and not stopped:
        console.print(
            f"[yellow]{len(defects)} episodes failed in every step by a fault of the env's own "
            f"code, so that their reward says nothing: {escape(defects[0])}[/]"
        )
    if stopped:
        _to_stderr(
            f"[red]stopped:[/] {escape(stopped)}. {len(tasks) - len(trajectories)} of {len(tasks)} "
            f"episodes were not played; `run --resume` goes on with {escape(str(output.part))}"
        )
    elif unwritten is not None:
        _to_stderr(f"[red]error:[/] {escape(unwritten)}")
    else:
        console.print(
            f"trajectories: {output.path}\ntraces:       {output.traces}\n"
            f"look at them: twinkle-rollout report {output.folder} --open",
            soft_wrap=True,
            markup=False,
        )
    trained, turns = trainable_turns(trajectories)
    failed = missing or defects or stopped or unwritten or trained < turns
    return EXIT_FAILED if failed else 0


def _finished(
    rollout: APIMultiTurnRollout,
    tasks: Sequence[Trajectory],
    output: RunOutput,
    servers: Servers | None,
    max_same_failures: int,
) -> Iterator[Any]:
    """Yield each trajectory once it has ended for good.

    Raises:
        StoppedError: The run makes no sense any more; what runs is cancelled.
    """
    by_id = {str(dict(task)["id"]): task for task in tasks}
    played = Counter[str]()
    away: set[str] = set()  # in flight when a server went away
    same = SameFailures(max_same_failures)

    def inputs() -> Iterator[Trajectory]:
        for name, task in by_id.items():
            played[name] += 1
            yield task

    def keep(row: Any) -> None:
        # At once, so that a kill loses nothing; what has failed may yet be played again.
        if row.get("reward") is not None and defect_of(row) is None:
            output.add(row)

    if not tasks:
        return
    ended: set[str] = set()
    with rollout.stream(inputs(), hold_open=True, on_done=keep) as stream:
        for row in stream:
            name = str(dict(row)["id"])
            lost = row.get("reward") is None and row.get("retryable")
            if lost and servers is not None and servers.wait():
                away = set(played) - ended
            if lost and name in away and played[name] < _MAX_PLAYED:
                away.discard(name)
                played[name] += 1
                if trace := row.get("trace_path"):
                    Path(trace).unlink(missing_ok=True)
                stream.submit(by_id[name])
                continue
            ended.add(name)
            if row.get("reward") is None:
                output.add(row)
            yield row
            same.add(row)
            if len(ended) == len(by_id):
                return


def _to_stderr(line: str) -> None:
    Console(stderr=True, emoji=False).print(line, soft_wrap=True)


def _write(output: RunOutput, trajectories: Sequence[Any]) -> str | None:
    """Write the results; return why they cannot be written, for what came of them can be shown."""
    try:
        output.finish(trajectories)
    except OSError as error:
        return (
            f"{output.path} cannot be written ({error.strerror}): the trajectories that could are "
            f"in {output.part}"
        )
    return None
