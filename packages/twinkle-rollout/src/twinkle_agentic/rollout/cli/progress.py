"""How far a run is: a bar on a terminal, elsewhere a line on stderr now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["ProgressBar", "ProgressLines", "make_progress"]

_INTERVAL_S = 30.0  # often enough for a log file to show that the job lives
_GAP_S = 2.0  # quick trajectories must not fill the log with lines of the same second
_TENTHS = 10


def make_progress(console: Console, total: int) -> ProgressBar | ProgressLines:
    """Return a bar where a person watches the console, lines on stderr elsewhere."""
    if console.is_interactive and console.file.isatty():
        return ProgressBar(console, total)
    return ProgressLines(total)


class ProgressBar(Progress):
    """A bar that is drawn anew in its place, a context manager."""

    def __init__(self, console: Console, total: int) -> None:
        self._scored = self._failed = 0
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[scored]} scored, {task.fields[failed]} failed"),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar = self.add_task("episodes", total=total, scored=0, failed=0)

    def add(self, *, scored: bool) -> None:
        """Count one trajectory that ended, with a reward or without."""
        self._scored += scored
        self._failed += not scored
        self.update(self._bar, advance=1, scored=self._scored, failed=self._failed)


class ProgressLines:
    """A line at the start, after each tenth of the trajectories, and after `interval_s` without.

    So a run writes two lines a minute and eleven more at most, and its log shows that it lives also
    while no trajectory ends. Where tenths follow each other faster than `gap_s`, one line stands
    for several; the last one comes at once.

    Args:
        total: Trajectories.
        write: Takes one line with its line break; by default it goes to stderr.
        interval_s: Seconds from one line to the next where no tenth comes between.
        gap_s: Seconds from one line to the next at least, where a tenth comes between.
    """

    def __init__(
        self,
        total: int,
        *,
        write: Callable[[str], None] | None = None,
        interval_s: float = _INTERVAL_S,
        gap_s: float = _GAP_S,
    ) -> None:
        self._total = total
        self._write = write or _to_stderr
        self._interval_s = interval_s
        self._gap_s = gap_s
        self._scored = self._failed = 0
        self._started = self._written = time.monotonic()
        self._due = False  # a tenth is full, its line not written yet
        self._ended = False
        self._changed = threading.Condition()
        self._ticker = threading.Thread(target=self._tick, name="twinkle-progress", daemon=True)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._write_line()
        self._ticker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._ticker.join()

    def add(self, *, scored: bool) -> None:
        """Count one trajectory that ended, with a reward or without."""
        with self._changed:
            before = self._done * _TENTHS // self._total
            self._scored += scored
            self._failed += not scored
            if self._done * _TENTHS // self._total == before:
                return
            if self._done == self._total or time.monotonic() >= self._written + self._gap_s:
                self._write_line()
            elif not self._due:
                self._due = True
                self._changed.notify()

    @property
    def _done(self) -> int:
        return self._scored + self._failed

    def _write_line(self) -> None:
        self._due = False
        self._written = time.monotonic()
        self._write(
            f"progress: {self._done} of {self._total} episodes done, {self._scored} scored, "
            f"{self._failed} failed, {self._written - self._started:.0f} s\n"
        )

    def _tick(self) -> None:
        with self._changed:
            while not self._ended:
                pause_s = self._gap_s if self._due else self._interval_s
                wait_s = self._written + pause_s - time.monotonic()
                if wait_s > 0:
                    self._changed.wait(wait_s)
                else:
                    self._write_line()


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a line that is lost must not end a run
        sys.stderr.write(line)
        sys.stderr.flush()
