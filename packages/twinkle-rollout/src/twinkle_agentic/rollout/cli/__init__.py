"""The `twinkle-rollout` command: quickstart, run, doctor, sweep."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code.

    Exit codes: 0 all is well; 1 the work is done but something in it failed (a trajectory without a
    reward, a server that does not answer); 2 the input was refused before anything started; 74 the
    work is done and well, but standard output could not be written; 130 Ctrl-C.
    """
    from twinkle_agentic.rollout.cli.refusal import EXIT_INTERRUPTED, EXIT_UNSEEN
    from twinkle_agentic.rollout.cli.streams import guard_streams

    lost = guard_streams()
    try:
        from twinkle_agentic.rollout.cli.app import app
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    try:
        app()
    except SystemExit as ended:
        if lost() and not ended.code:
            raise SystemExit(EXIT_UNSEEN) from None
        raise
