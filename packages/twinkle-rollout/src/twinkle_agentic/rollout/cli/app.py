"""The commands, and how each of them ends."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from twinkle_agentic.rollout.cli.doctor import doctor
from twinkle_agentic.rollout.cli.options import as_parameters
from twinkle_agentic.rollout.cli.quickstart import quickstart
from twinkle_agentic.rollout.cli.refusal import EXIT_INTERRUPTED, EXIT_REFUSED, RefusedError
from twinkle_agentic.rollout.cli.replay import replay
from twinkle_agentic.rollout.cli.run import run
from twinkle_agentic.rollout.cli.show import report, show
from twinkle_agentic.rollout.cli.sweep import sweep

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="From a model endpoint and environments to scored trajectories.\n\n"
    "Begin with `twinkle-rollout quickstart`, which needs no model. Exit codes: 0 success; "
    "1 the work is done, but something in it failed; 2 refused before anything started; "
    "74 success, but standard output could not be written; 128 + n ended by signal n.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"twinkle-rollout {version('twinkle-rollout')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Take the options before a command."""


class _Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised so that a command ends as on Ctrl-C: with everything closed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum  # as shells report it


def _stop(signum: int, _: FrameType | None) -> None:
    raise _Stopped(signum)


def _exit(body: Callable[..., int], given: dict[str, Any]) -> None:
    """Run a command and end the process with its exit code."""
    from twinkle_agentic.rollout.testing import ServerError

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    # Without emoji: what stands between colons (`module:x: cannot ...`) is text of the user.
    console, errors = Console(emoji=False), Console(stderr=True, emoji=False)
    try:
        code = body(console, **given)
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


def _register(body: Callable[..., int]) -> None:
    parameters, options = as_parameters(body)

    def command(**given: Any) -> None:
        _exit(body, {"options": options(**given)} if options else given)

    command.__doc__ = body.__doc__
    command.__annotations__ = {}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    app.command(body.__name__)(command)


for _body in (quickstart, run, report, show, replay, doctor, sweep):
    _register(_body)
