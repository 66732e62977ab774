"""Kill the sandboxes that dead trainers left behind, and say what was done."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from twinkle_agentic.rollout.cli.refusal import EXIT_FAILED, RefusedError

__all__ = ["sweep"]


def sweep(
    console: Console,
    *,
    api_url: str | None,
    api_key: str | None,
    run: str | None,
    older_than_s: float | None,
    include_live: bool,
    dry_run: bool,
) -> int:
    """Sweep one server; the options are those of `twinkle_agentic.envs.agentenv.sweep`.

    Returns:
        0 where no orphan is left, 1 where one could not be killed.

    Raises:
        RefusedError: The package is missing, an option is impossible, or the server does not
            answer.
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
