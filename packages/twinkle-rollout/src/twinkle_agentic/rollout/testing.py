"""Servers of our own as child processes: started on a free port, awaited, stopped on every path."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Self

__all__ = ["ServerError", "ServerProcess", "free_port"]

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal the kernel sends when the parent dies
_POLL_S = 0.05
_LOG_TAIL_CHARS = 2_000


class ServerError(RuntimeError):
    """A server did not come up; the message ends with the tail of what it printed."""


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class ServerProcess:
    """One server process, a context manager: entering starts it, leaving stops it.

    The process dies with this one, also when this one is killed (Linux). Its output goes to a
    temporary file that is shown only when it fails.

    Args:
        name: For messages.
        command: Makes the command line for a port, e.g. `lambda port: [sys.executable, "-m", ...,
            str(port)]`.
        health_path: Answered with 200 once the server is ready.
        env: Additions to the environment of the process.
        stop_timeout_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        *,
        health_path: str = "/health",
        env: dict[str, str] | None = None,
        stop_timeout_s: float = 5.0,
    ) -> None:
        self.name = name
        self.port = 0
        self._command = command
        self._health_path = health_path
        self._env = env or {}
        self._stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Where the server listens, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id, `None` before the start and after the stop."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> Self:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                self._command(self.port),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,  # Ctrl-C reaches us alone; we stop the server in order
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server answers its health path.

        Raises:
            ServerError: It ended, or did not answer within `timeout_s` seconds.
        """
        if self._process is None:
            raise ServerError(f"the {self.name} was not started: enter the context manager first")
        deadline = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by a proxy
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"the {self.name} ended with exit code {code}:\n{self._tail()}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerError(
                    f"the {self.name} did not answer on {self.url}{self._health_path} within "
                    f"{timeout_s:g} s:\n{self._tail()}"
                )
            try:
                with opener.open(self.url + self._health_path, timeout=min(2.0, left)):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the server: SIGTERM, then SIGKILL for its whole process group; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # workers it may have left, or itself
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-_LOG_TAIL_CHARS:].strip()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
