"""Temporary directories that do not outlive a killed process for long."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from twinkle_isolation._guest.trees import remove_tree

__all__ = ["discard", "make_scratch"]


def discard(directory: str | os.PathLike[str]) -> None:
    """Remove a directory with all below it, as far as that is possible."""
    with contextlib.suppress(OSError):
        remove_tree(directory)


def make_scratch(kind: str, parent: str | os.PathLike[str] | None = None) -> Path:
    """Make a temporary directory, and remove those that processes which are gone left behind.

    Args:
        kind: A word for its name, which is `twinkle-KIND-PID-RANDOM`.
        parent: Where; the system's place for temporary files by default.

    Raises:
        OSError: It cannot be made.
    """
    place = Path(tempfile.gettempdir() if parent is None else parent)
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob(f"twinkle-{kind}-*-*"):
        pid = old.name.split("-")[-2]
        with contextlib.suppress(OSError):
            ours = old.lstat().st_uid == os.geteuid() and old.is_dir() and not old.is_symlink()
            if ours and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                discard(old)
    return Path(tempfile.mkdtemp(prefix=f"twinkle-{kind}-{os.getpid()}-", dir=place))
