"""Remove directories that a sandbox made: however deep, closed or full of links they are."""

from __future__ import annotations

import contextlib
import os
import secrets

__all__ = ["remove_tree"]

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Remove a directory with all below it; links are not followed.

    Directories are moved up before they are emptied. So it takes neither a stack, nor a descriptor
    for each level, nor a path that is longer than the system allows.

    Raises:
        OSError: Something could not be removed; the rest is.
    """
    top = _open(os.fspath(path), None)
    try:
        while names := os.listdir(top):
            failure: OSError | None = None
            removed = False
            for name in names:
                try:
                    _remove(name, top)
                    removed = True
                except FileNotFoundError:
                    removed = True  # somebody else was faster
                except OSError as error:
                    failure = error
            if failure is not None and not removed:
                raise failure
    finally:
        os.close(top)
    os.rmdir(path)


def _remove(name: str, top: int) -> None:
    """Remove one thing in the directory `top`; the directories in it become things in `top`."""
    try:
        os.unlink(name, dir_fd=top)
    except IsADirectoryError:
        inner = _open(name, top)
        try:
            for child in os.listdir(inner):
                try:
                    os.unlink(child, dir_fd=inner)
                except IsADirectoryError:
                    os.close(_open(child, inner))  # what is closed to its owner cannot be moved
                    os.rename(child, secrets.token_hex(16), src_dir_fd=inner, dst_dir_fd=top)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)


def _open(name: str, parent: int | None) -> int:
    """Open a directory, and open it to its owner."""
    handle = os.open(name, os.O_PATH | _DIRECTORY, dir_fd=parent)
    try:
        with contextlib.suppress(OSError):  # not ours: then it is as it is
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
