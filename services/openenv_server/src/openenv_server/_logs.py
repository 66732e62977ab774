"""Where the logs of the server and its workers go: standard error, one line per event.

A thread writes them. When standard error is a pipe that is not read, the thread waits and lines are
dropped; the server does not wait.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading

__all__ = ["configure_logs", "flush_logs"]

_MAX_WAITING = 10_000
_FLUSH_S = 1.0


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))

    def flush(self) -> None:
        """Write what waits, for a second at most, and write no more."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_FLUSH_S)
        self._thread.join(_FLUSH_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(line + "\n")
                sys.stderr.flush()


def configure_logs(level: str) -> None:
    """Write the logs of this process to standard error."""
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "asyncio"):  # a line for each connection: the sessions say that
        logging.getLogger(name).setLevel("WARNING")


def flush_logs() -> None:
    """Write what waits to be written; at the end of the process."""
    for handler in logging.getLogger().handlers:
        handler.flush()
