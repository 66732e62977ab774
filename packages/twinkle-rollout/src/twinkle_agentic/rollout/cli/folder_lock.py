"""One run at a time in an output folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from twinkle_agentic.rollout.cli.refusal import RefusedError

__all__ = ["FolderLock"]

logger = logging.getLogger(__name__)

_TAKEN = (errno.EAGAIN, errno.EACCES)  # the second is what some network file systems say


class FolderLock:
    """Keeps other runs out of a folder, whichever process they are in.

    The kernel holds the lock (`flock` on the file `.lock`), so it ends with the process, however
    that ends. `release` removes the file.

    Args:
        folder: Exists when `acquire` is called.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, at once or not at all.

        Where the file system has no locks, a warning is logged and nothing is kept out.

        Raises:
            RefusedError: Another run has it.
            OSError: The file cannot be made.
        """
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(fd)
                if self._is_current(fd):
                    os.ftruncate(fd, 0)
                    os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    self._fd = fd
            finally:
                if self._fd is None:
                    os.close(fd)

    def release(self) -> None:
        """Give the lock back; idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):  # gone with its folder, say
            self._path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor too
        os.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                holder = os.pread(fd, 200, 0).decode("utf-8", "replace") or "another run"
                raise RefusedError(
                    f"{self._folder} is in use by {holder}: choose another --out, or wait until "
                    "that run has ended"
                ) from error
            logger.warning("%s cannot be locked against other runs: %s", self._folder, error)

    def _is_current(self, fd: int) -> bool:
        """Tell whether the file still has its name: its last holder removes it."""
        try:
            named = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(fd))
