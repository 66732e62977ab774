"""The commands and their options."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from twinkle_agentic.rollout.cli.refusal import EXIT_INTERRUPTED, EXIT_REFUSED, RefusedError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="From a model endpoint and environments to scored trajectories.\n\n"
    "Exit codes: 0 all is well, 1 the work is done but something in it failed, "
    "2 the input was refused before anything started, 74 all is well but standard output could not "
    "be written, 128 + n ended by signal n (130: Ctrl-C).",
)


_LARGEST = 1e9  # `MAX_LIMIT_S` of twinkle_agentic._aio.limits, which takes time to import


def _finite(value: float | None) -> float | None:
    """Refuse what is refused anyway, before anything is written."""
    if value is not None and value > _LARGEST:
        raise typer.BadParameter(f"{value:g} is not in the range x<={_LARGEST:g}")
    return value


_Plots = Annotated[
    bool | None,
    typer.Option(
        "--plots/--no-plots",
        help="Draw histograms of rewards and turns at the end; by default on a terminal only.",
        show_default=False,
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinkle-rollout {version('twinkle-rollout')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version."),
    ] = False,
) -> None:
    """Take the options before a command."""


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/quickstart"),
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Episodes at once.")] = 32,
    faults: Annotated[
        bool,
        typer.Option(
            "--faults", help="Let the endpoint misbehave: 500s, hangs, broken calls, null ids."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--keep", help="Replace the result of an earlier run.")
    ] = True,
    plots: _Plots = None,
) -> None:
    """Run 32 coding tasks on this machine, with a scripted policy in place of a model.

    Starts a coding server and a chat-completions endpoint on free ports, rolls out the packaged
    tasks, prints a table, writes trajectories and traces, and stops what it started.
    """
    from twinkle_agentic.rollout.cli.quickstart import quickstart as run_quickstart

    _exit(
        lambda console: run_quickstart(
            console,
            out=out,
            concurrency=concurrency,
            faults=faults,
            overwrite=overwrite,
            plots=plots,
        )
    )


@app.command()
def run(
    tasks: Annotated[
        Path,
        typer.Argument(help="JSON Lines, one task a line: `prompt` or `messages`, and more."),
    ],
    env: Annotated[
        str,
        typer.Option(
            help="`coding_env` (scored by the column `tests`), another OpenEnv package name, or "
            "`module:name` of a callable that takes the trajectory and returns an Env."
        ),
    ],
    model: Annotated[str, typer.Option(help="Model name, as the endpoint knows it.")],
    model_url: Annotated[
        str, typer.Option(help="Base URL of the endpoint, with its /v1: http://host:8000/v1")
    ],
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="The OpenEnv server; several times, or with commas between, for several, which "
            "share the episodes. Their token is read from OPENENV_TOKEN.",
            envvar="OPENENV_BASE_URL",
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of the endpoint.", envvar="OPENAI_API_KEY")
    ] = None,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/latest"),
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Episodes at once.")] = 64,
    max_turns: Annotated[
        int, typer.Option(min=1, metavar="N", help="Model turns per episode.")
    ] = 10,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens the model may write per turn.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=_finite, metavar="X", help="Sampling temperature.")
    ] = 1.0,
    request_timeout_s: Annotated[
        float,
        typer.Option(
            min=0.001,
            callback=_finite,
            metavar="SEC",
            help="Seconds for one model turn, retries included.",
        ),
    ] = 600.0,
    deadline_s: Annotated[
        float | None,
        typer.Option(
            min=0.001, callback=_finite, metavar="SEC", help="Seconds for one whole episode."
        ),
    ] = None,
    step_timeout_s: Annotated[
        float,
        typer.Option(
            min=0.001,
            callback=_finite,
            metavar="SEC",
            help="Seconds for one step on the OpenEnv server.",
        ),
    ] = 120.0,
    samples: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Trajectories per task, as group-relative methods need them."
        ),
    ] = 1,
    attempts: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="Times an episode is played at most, where a failure that may pass ended it.",
        ),
    ] = 1,
    tokens: Annotated[
        bool,
        typer.Option(
            "--tokens",
            help="Keep the token ids and log probabilities of each turn, to train on: "
            "`token_turns`. The endpoint must know `return_token_ids`, as vLLM does.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the result of an earlier run.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep what an earlier run in --out has scored, and run the others; with nothing "
            "there, start.",
        ),
    ] = False,
    plots: _Plots = None,
) -> None:
    """Roll out your own tasks with your own model and environment.

    A task is one JSON object a line, for example

    {"prompt": "Write add(a, b) ...", "tests": "assert add(2, 3) ==
    5"}

    Columns: `prompt` (the user message) or `messages` (the whole conversation);
    `system`, a system message before it; `tests`, Python source with assert
    statements, which the model does not see; `seed`, for the reset of the
    environment; `id`, by default the line number; `user_data`, an object
    offered to the reset and kept in the output.

    With `--env coding_env` the model gets run_python(code), without reward, and
    submit_solution(code), which runs the code and then `tests`: all pass is
    reward 1.0 and the end. Else it gets the tools of the server, or of your
    Env.

    The file is checked whole, and the servers are asked whether they are there,
    before anything starts.
    """
    from twinkle_agentic.rollout.cli.run import RunOptions
    from twinkle_agentic.rollout.cli.run import run as run_tasks

    options = RunOptions(
        tasks=tasks,
        env=env,
        base_urls=[
            url.strip() for part in base_url or () for url in part.split(",") if url.strip()
        ],
        model=model,
        model_url=model_url,
        api_key=api_key,
        out=out,
        concurrency=concurrency,
        max_turns=max_turns,
        max_tokens=max_tokens,
        temperature=temperature,
        request_timeout_s=request_timeout_s,
        deadline_s=deadline_s,
        step_timeout_s=step_timeout_s,
        samples=samples,
        attempts=attempts,
        tokens=tokens,
        overwrite=overwrite,
        resume=resume,
        plots=plots,
    )
    _exit(lambda console: run_tasks(console, options))


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="The output folder of a run; of two, to see them side by side."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file; by default report.html in the first folder."),
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open it in your browser.")] = False,
) -> None:
    """Write one HTML page of a run, to look at: it needs no server and no network.

    Rewards, turns, stop reasons, where the time went, groups without spread, failures with their
    cause, the slowest tools, and every trajectory to read, filter and search.
    """
    from twinkle_agentic.rollout.cli.show import report as write

    _exit(lambda console: write(console, runs, out=out, browse=browse))


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.")],
    ids: Annotated[
        list[str] | None, typer.Argument(help="Trajectories by their id; all of them without.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only those with an error, or without a reward.")
    ] = False,
    group: Annotated[str | None, typer.Option(help="Only the samples of this task.")] = None,
    limit: Annotated[int, typer.Option("--n", min=1, metavar="N", help="At most so many.")] = 10,
) -> None:
    """Print trajectories: messages, calls with their code, rewards, the whole error.

    Exit code 1 where no trajectory fits.
    """
    from twinkle_agentic.rollout.cli.show import show as print_trajectories

    _exit(
        lambda console: print_trajectories(
            console, run, ids=ids or (), failed=failed, group=group, limit=limit
        )
    )


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.")],
    env: Annotated[str, typer.Option(help="As for `run`: what made the environments.")],
    ids: Annotated[
        list[str] | None, typer.Argument(help="Trajectories by their id; all of them without.")
    ] = None,
    base_url: Annotated[
        list[str] | None, typer.Option(help="The OpenEnv server.", envvar="OPENENV_BASE_URL")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Episodes at once.")] = 64,
    step_timeout_s: Annotated[
        float,
        typer.Option(min=0.001, callback=_finite, metavar="SEC", help="Seconds for one step."),
    ] = 120.0,
    score_only: Annotated[
        bool, typer.Option("--score-only", help="Play no step: run `evaluate` alone.")
    ] = False,
) -> None:
    """Play the recorded actions again in fresh environments, without a model, and compare.

    Says for each trajectory whether observations, rewards and the end came out the same, and where
    not, at which step and what differed. Exit code 1 where anything differs or could not be played.
    """
    from twinkle_agentic.rollout.cli.replay import replay_run

    _exit(
        lambda console: replay_run(
            console,
            run,
            env=env,
            base_urls=base_url or (),
            ids=ids or (),
            concurrency=concurrency,
            step_timeout_s=step_timeout_s,
            score_only=score_only,
        )
    )


@app.command()
def doctor(
    openenv_url: Annotated[
        list[str] | None, typer.Option("--openenv-url", help="An OpenEnv server to ask.")
    ] = None,
    sandbox_url: Annotated[
        list[str] | None, typer.Option("--sandbox-url", help="A sandbox server to ask.")
    ] = None,
    model_url: Annotated[
        list[str] | None, typer.Option("--model-url", help="A model endpoint to ask, with its /v1.")
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(min=0.001, callback=_finite, metavar="SEC", help="Seconds for each answer."),
    ] = 5.0,
) -> None:
    """Say what is installed, where each module comes from, and whether servers answer."""
    from twinkle_agentic.rollout.cli import probes
    from twinkle_agentic.rollout.cli.doctor import doctor as run_doctor

    model_key, sandbox_key = os.environ.get("OPENAI_API_KEY"), os.environ.get("E2B_API_KEY")
    _exit(
        lambda console: run_doctor(
            console,
            probes=[
                *(probes.probe_openenv(url, timeout_s=timeout_s) for url in openenv_url or ()),
                *(
                    probes.probe_sandboxes(url, api_key=sandbox_key, timeout_s=timeout_s)
                    for url in sandbox_url or ()
                ),
                *(
                    probes.probe_model(url, api_key=model_key, timeout_s=timeout_s)
                    for url in model_url or ()
                ),
            ],
        )
    )


@app.command()
def sweep(
    api_url: Annotated[
        str | None, typer.Option(envvar="E2B_API_URL", help="The sandbox server or gateway.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="E2B_API_KEY", help="Its key.", show_envvar=True)
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="Only sandboxes with this run label.")
    ] = None,
    older_than_s: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SEC", help="Only those started longer ago than this."),
    ] = None,
    include_live: Annotated[
        bool, typer.Option("--include-live", help="Kill those of running trainers too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Kill nothing, say what would be killed.")
    ] = False,
) -> None:
    """Kill sandboxes whose trainer is gone, paused ones included.

    Only sandboxes made by `AgentEnv` are looked at, by their labels. One whose trainer still runs
    on this host is spared; those of another host or container, or from before a restart, are killed
    only when --run or --older-than-s names them.
    """
    from twinkle_agentic.rollout.cli.sweep import sweep as run_sweep

    _exit(
        lambda console: run_sweep(
            console,
            api_url=api_url,
            api_key=api_key,
            run=run_id,
            older_than_s=older_than_s,
            include_live=include_live,
            dry_run=dry_run,
        )
    )


class _Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, made to end a command as Ctrl-C does: with everything closed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum  # as shells report it


def _stop(signum: int, _: FrameType | None) -> None:
    raise _Stopped(signum)


def _exit(command: Callable[[Console], int]) -> None:
    """Run a command and end the process with its exit code."""
    from twinkle_agentic.rollout.testing import ServerError

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    # Without emoji: what stands between colons (`module:x: cannot ...`) is text of the user.
    console, errors = Console(emoji=False), Console(stderr=True, emoji=False)
    try:
        code = command(console)
    except (RefusedError, ServerError) as refusal:
        errors.print(f"[red]error:[/] {escape(str(refusal))}", soft_wrap=True)
        code = EXIT_REFUSED
    except KeyboardInterrupt as stopped:
        errors.print(
            "interrupted: what was finished, if anything, is in the output folder (*.part); "
            "`run --resume` goes on with it"
        )
        code = stopped.exit_code if isinstance(stopped, _Stopped) else EXIT_INTERRUPTED
    raise typer.Exit(code)
