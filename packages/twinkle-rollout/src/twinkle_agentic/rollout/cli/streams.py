"""Standard streams that may break without ending the work of a command.

The work is in files and takes hours; what is printed is a view of it. A full disk under a log file,
or a `| head -1` that has read enough, must cost that view only.
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
    sys.stderr = _text(sys.stderr, _Guarded(sys.stderr, 2))
    raw = _Guarded(sys.stdout, 1)
    sys.stdout = stdout = _text(sys.stdout, raw)

    def lost() -> bool:
        stdout.flush()
        return raw.lost

    return lost


class _Guarded(io.FileIO):
    """A standard stream that accepts everything, also what cannot be written."""

    def __init__(self, stream: Any, fd: int) -> None:
        self.lost = False
        self._is_stdout = fd == 1
        if stream is None:  # the descriptor was closed before the interpreter started
            # The next file to be opened must not get its number, and with it what is printed.
            fd = os.open(os.devnull, os.O_WRONLY)
        super().__init__(fd, "w", closefd=False)
        if stream is None:
            self._lose(OSError(errno.EBADF, "it is closed"))
        else:
            stream.flush()

    def write(self, data: Any, /) -> int | None:
        """Write, or drop; return the bytes that were taken."""
        if not self.lost:
            try:
                return super().write(data)
            except OSError as error:
                self._lose(error)
        return memoryview(data).nbytes

    def _lose(self, error: OSError) -> None:
        self.lost = True
        if self._is_stdout:
            sys.stderr.write(
                f"error: standard output cannot be written ({error.strerror}): the work goes on, "
                "and result files are written\n"
            )


def _text(stream: Any, raw: _Guarded) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None),
        errors="replace",  # a table must not fail on an ASCII terminal
        line_buffering=raw.isatty() or stream is sys.stderr,
    )
