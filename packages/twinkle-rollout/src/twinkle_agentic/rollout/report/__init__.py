"""Read a finished (or running) run: one HTML page to look at, or a trajectory in the terminal."""

from __future__ import annotations

from twinkle_agentic.rollout.report._page import write_report
from twinkle_agentic.rollout.report._rows import Run, RunNotFoundError

__all__ = ["Run", "RunNotFoundError", "write_report"]
