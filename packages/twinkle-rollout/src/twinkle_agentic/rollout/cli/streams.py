"""The standard streams of a command, which may break without ending its work.

The work of a command is in files and takes hours; what it prints is a view of it. A full disk under
a log file, or a `| head -1` that has read enough, must cost that view only.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["guard_streams"]


def guard_streams() -> Callable[[], bool]:
    """Put streams in place of `sys.stdout` and `sys.stderr` that never raise.

    What cannot be written is dropped, and so is everything after it on the same stream; the first
    loss on stdout is one line on stderr.

    Returns:
        Tells, when called at the end, whether anything written to stdout was lost.
    """
    sys.stderr = _guarded(sys.stderr, 2, _say_nothing)[0]
    stdout, raw = _guarded(sys.stdout, 1, _say_that_stdout_is_lost)
    sys.stdout = stdout

    def lost() -> bool:
        stdout.flush()
        return raw.lost

    return lost


class _Guarded(io.FileIO):
    """A file descriptor that takes everything, also what cannot be written."""

    def __init__(self, fd: int, on_loss: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self.lost = False
        self._on_loss = on_loss

    def write(self, data: Any, /) -> int | None:
        """Write, or drop; return the bytes that were taken."""
        if not self.lost:
            try:
                return super().write(data)
            except OSError as error:
                self.lose(error)
        return memoryview(data).nbytes

    def lose(self, error: OSError) -> None:
        """Drop everything from now on."""
        self.lost = True
        self._on_loss(error)


def _guarded(
    stream: Any, fd: int, on_loss: Callable[[OSError], None]
) -> tuple[io.TextIOWrapper, _Guarded]:
    if stream is None:  # the descriptor was closed before the interpreter started
        # Occupied, for the next file that is opened would get its number and what is printed.
        raw = _Guarded(os.open(os.devnull, os.O_WRONLY), on_loss)
        raw.lose(OSError(errno.EBADF, "it is closed"))
    else:
        stream.flush()
        raw = _Guarded(fd, on_loss)
    text = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None),
        errors="replace",  # a table must not fail on an ASCII terminal
        line_buffering=raw.isatty() or fd == 2,
    )
    return text, raw


def _say_nothing(_: OSError) -> None:
    """Of stderr: there is no place left to say it."""


def _say_that_stdout_is_lost(error: OSError) -> None:
    sys.stderr.write(
        f"error: standard output cannot be written ({error.strerror}): the work goes on, and "
        "result files are written\n"
    )
