"""The `twinkle-rollout` command: quickstart, run, doctor, sweep."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code.

    Exit codes: 0 all is well; 1 the work is done but something in it failed (a trajectory without a
    reward, a server that does not answer); 2 the input was refused before anything started; 130
    Ctrl-C.
    """
    from twinkle_agentic.rollout.cli.app import app

    app()
