"""The writable files of a sandbox as one tar stream: the whole of a snapshot."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator

__all__ = ["dump", "restore"]


def dump(fd: int, root: str) -> None:
    """Write what is below `root`, on its file system, to `fd`; sockets are left out."""
    with (
        os.fdopen(fd, "wb", buffering=1 << 20) as file,
        tarfile.open(fileobj=file, mode="w|") as tar,
    ):
        device = os.lstat(root).st_dev
        for path in _walk(root, device):
            name = os.path.relpath(path, root)
            try:
                tar.add(path, name, recursive=False)
            except FileNotFoundError:
                continue  # gone since it was listed


def _walk(directory: str, device: int) -> Iterator[str]:
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        info = entry.stat(follow_symlinks=False)
        if info.st_dev != device or stat.S_ISSOCK(info.st_mode):
            continue
        yield entry.path
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, device)


def restore(fd: int, root: str) -> None:
    """Unpack what `dump` wrote into `root`."""
    with (
        os.fdopen(fd, "rb", buffering=1 << 20) as file,
        tarfile.open(fileobj=file, mode="r|") as tar,
    ):
        if hasattr(tarfile, "fully_trusted_filter"):
            # This process reaches nothing but its own sandbox: a hostile archive gains nothing.
            tar.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
        for member in tar:
            tar.extract(member, root, set_attrs=True, numeric_owner=True)
