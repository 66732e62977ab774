"""The commands that read a run: `report` writes a page, `show` prints trajectories."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.syntax import Syntax
from rich.text import Text

from twinkle_agentic.rollout.cli.options import RunFolder, RunIds
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED, RefusedError
from twinkle_agentic.rollout.report import Run, RunNotFoundError, write_report
from twinkle_agentic.rollout.report._rows import calls_of, group_of, messages_of, parts_of

__all__ = ["print_trajectory", "report", "show"]

_SUGGESTED = 5  # ids that the error of an unknown one names


def report(
    console: Console,
    *,
    runs: Annotated[
        list[Path],
        typer.Argument(help="The output folder of a run; of two, to see them side by side."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file; by default report.html in the first folder."),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open it in your browser.")] = False,
) -> int:
    """Write one HTML page of a run, to look at: it needs no server and no network.

    Rewards, turns, stop reasons, where the time went, groups without spread, failures with their
    cause, the slowest tools, and every trajectory to read, filter and search.
    """
    if len(runs) > 2:
        raise RefusedError(f"a report shows one run or two side by side, found {len(runs)}")
    found = [_open(path) for path in runs]
    target = out or found[0].file.parent / "report.html"
    try:
        count = write_report(found, target)
    except (ValueError, OSError) as error:
        raise RefusedError(f"no report: {error}") from error
    console.print(f"{count} trajectories: {escape(str(target))}", soft_wrap=True)
    if browse and not webbrowser.open(target.resolve().as_uri()):
        console.print("no browser was found: open the file yourself")
    return 0


def show(
    console: Console,
    *,
    run: RunFolder,
    ids: RunIds = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those with an error, or without a reward.")
    ] = False,
    group: Annotated[str | None, typer.Option(help="Only the samples of this task.")] = None,
    limit: Annotated[int, typer.Option("--n", min=1, metavar="N", help="At most so many.")] = 10,
) -> int:
    """Print trajectories: messages, calls with their code, rewards, the whole error.

    Exit code 1 where no trajectory fits.
    """
    recorded = _open(run)
    try:
        rows = _chosen(recorded, ids=ids or (), failed=failed, group=group)
        chosen = list(islice(rows, limit + 1))
    except ValueError as error:
        raise RefusedError(str(error)) from error
    missing = set(ids or ()) - {str(row.get("id")) for row in chosen}
    if missing and len(chosen) <= limit:
        known = ", ".join(repr(str(row.get("id"))) for row in islice(recorded.rows(), _SUGGESTED))
        raise RefusedError(
            f"{recorded.file} has no trajectory {', '.join(map(repr, sorted(missing)))}: "
            f"its ids are {known} ..."
        )
    for row in chosen[:limit]:
        print_trajectory(console, row)
    if len(chosen) > limit:
        console.print(f"[dim]more follow: --n shows more than {limit}[/]")
    if not chosen:
        console.print("no trajectory fits")
    return 0 if chosen else EXIT_FAILED


def _open(path: Path) -> Run:
    try:
        return Run.open(path)
    except RunNotFoundError as error:
        raise RefusedError(str(error)) from error


def _chosen(
    run: Run, *, ids: Sequence[str], failed: bool, group: str | None
) -> Iterator[Mapping[str, Any]]:
    for row in run.rows():
        if ids and str(row.get("id")) not in ids:
            continue
        if failed and not row.get("error") and row.get("reward") is not None:
            continue
        if group is not None and group_of(row) != group:
            continue
        yield row


def print_trajectory(console: Console, row: Mapping[str, Any]) -> None:
    """Print one trajectory whole."""
    reward = row.get("reward")
    outcome = "no reward" if reward is None else f"reward {reward:g}"
    turns = row.get("turns", 0)
    console.print(
        Rule(escape(f"{row.get('id')}: {outcome}, {row.get('stop_reason')}"), align="left")
    )
    facts = [f"turns {turns}"]
    if row.get("step_rewards"):
        facts.append(f"step rewards {' '.join(f'{value:g}' for value in row['step_rewards'])}")
    if row.get("failed_steps"):
        facts.append(f"failed steps {' '.join(map(str, row['failed_steps']))}")
    timing: dict[str, float] = row.get("timing") or {}
    facts += [f"{name} {value:.2f} s" for name, value in timing.items()]
    console.print(Text(", ".join(facts), style="dim"))
    for number, error in enumerate(row.get("earlier_errors") or (), 1):
        console.print(Text(f"attempt {number}: {error}", style="red"), soft_wrap=True)
    for name in ("error", "close_error"):
        if row.get(name):
            console.print(Text(f"{name}: {row[name]}", style="red"), soft_wrap=True)
    turn = 0
    for message in messages_of(row):
        turn += message.get("role") == "assistant"
        _print_message(console, message, turn)


def _print_message(console: Console, message: Mapping[str, Any], turn: int) -> None:
    role = str(message.get("role"))
    title = f"turn {turn}" if role == "assistant" else role
    console.print(Text(title, style="bold"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        _print_text(console, str(reasoning), style="italic dim")
    for part in parts_of(message):
        _print_text(console, str(part.get("text", f"[{part.get('type')}]")))
    for tool, arguments in calls_of(message):
        console.print(Padding(Text(f"calls {tool}", style="cyan"), (0, 0, 0, 2)))
        for name, value in _arguments(arguments):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if "\n" in text:
                console.print(Padding(Text(f"{name}:", style="dim"), (0, 0, 0, 4)))
                lexer = "python" if name == "code" else "text"
                console.print(
                    Padding(
                        Syntax(text, lexer, background_color="default", word_wrap=True),
                        (0, 0, 0, 6),
                    )
                )
            else:
                console.print(Padding(Text(f"{name}: {text}"), (0, 0, 0, 4)))


def _print_text(console: Console, text: str, *, style: str = "") -> None:
    if text:
        console.print(Padding(Text(text, style=style), (0, 0, 0, 2)))


def _arguments(text: Any) -> list[tuple[str, Any]]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError):
        return [("arguments", str(text))]
    if not isinstance(found, dict):
        return [("arguments", text)]
    return list(cast("dict[str, Any]", found).items())
