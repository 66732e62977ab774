"""How a command says no, and the codes it ends with."""

from __future__ import annotations

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_REFUSED", "EXIT_UNSEEN", "RefusedError"]

EXIT_FAILED = 1  # the work is done, something in it failed
EXIT_REFUSED = 2  # nothing was started
EXIT_UNSEEN = 74  # all is well, but stdout could not be written; EX_IOERR of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class RefusedError(Exception):
    """The input cannot be used; the message is the one line that the user sees."""
