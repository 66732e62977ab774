"""Kill the sandboxes that dead trainers left behind, and say what was done."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from twinkle_agentic.rollout.cli.options import seconds
from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED, RefusedError

__all__ = ["sweep"]


def sweep(
    console: Console,
    *,
    api_url: Annotated[
        str | None, typer.Option(envvar="E2B_API_URL", help="The sandbox server or gateway.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="E2B_API_KEY", help="Its key.")] = None,
    run: Annotated[str | None, typer.Option(help="Only sandboxes with this run label.")] = None,
    older_than_s: Annotated[
        float | None, seconds("Only those started longer ago than this.", at_least=0.0)
    ] = None,
    include_live: Annotated[
        bool, typer.Option("--include-live", help="Kill those of running trainers too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Kill nothing, say what would be killed.")
    ] = False,
) -> int:
    """Kill sandboxes whose trainer has ended, paused ones included.

    Only sandboxes made by `AgentEnv` are considered, by their labels. One whose trainer still runs
    on this host is spared; those of another host or container, or from before a restart, are killed
    only when --run or --older-than-s names them. Exit code 1 where one could not be killed.
    """
    try:
        from twinkle_agentic.envs.agentenv import sweep as sweep_server
        from twinkle_agentic.envs.errors import SandboxError
    except ModuleNotFoundError as error:
        raise RefusedError(
            f"sweep needs twinkle-envs-agentenv, which cannot be imported ({error}): "
            "run `pip install twinkle-envs-agentenv`"
        ) from error
    try:
        report = sweep_server(
            api_url=api_url,
            api_key=api_key,
            run=run,
            older_than_s=older_than_s,
            include_live=include_live,
            dry_run=dry_run,
        )
    except (SandboxError, ValueError) as error:
        raise RefusedError(str(error)) from error
    table = Table("sandbox", "what", "why")
    for sandbox_id in report.killed:
        what = "would be killed" if dry_run else "killed"
        table.add_row(sandbox_id, what, report.reasons[sandbox_id])
    for sandbox_id, reason in report.spared.items():
        table.add_row(sandbox_id, "spared", reason)
    for sandbox_id, error in report.failed.items():
        table.add_row(sandbox_id, "[red]not killed[/]", error)
    if table.row_count:
        console.print(table)
    verb = "would be killed" if dry_run else "killed"
    console.print(
        f"{report.found} of ours found, {len(report.killed)} {verb}, {len(report.spared)} spared, "
        f"{len(report.failed)} failed"
    )
    return EXIT_FAILED if report.failed else 0
