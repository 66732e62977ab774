"""The writable files of a sandbox as one tar stream: the whole of a snapshot."""

from __future__ import annotations

import contextlib
import copy
import os
import stat
import tarfile
from collections.abc import Generator

__all__ = ["dump", "restore"]

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def dump(fd: int, root: str) -> None:
    """Write what is below `root`, on its file system, to `fd`; sockets are left out.

    Files and directories that their owner may not read are opened for a moment.

    Raises:
        OSError: Something cannot be read.
    """
    # Names of users would be looked up in the sandbox's own /etc.
    tarfile.pwd = tarfile.grp = None  # type: ignore[attr-defined]
    with (
        os.fdopen(fd, "wb", buffering=1 << 20) as file,
        tarfile.open(fileobj=file, mode="w|") as tar,
    ):
        _dump_directory(tar, root, "", os.lstat(root).st_dev)


def _dump_directory(tar: tarfile.TarFile, directory: str, prefix: str, device: int) -> None:
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        try:
            info = os.lstat(path)
            if info.st_dev != device or stat.S_ISSOCK(info.st_mode):
                continue
            member = tar.gettarinfo(path, prefix + name)
            if member.isreg():
                with os.fdopen(_open(path, info.st_mode), "rb") as file:
                    tar.addfile(member, file)
            else:
                tar.addfile(member)
        except FileNotFoundError:
            continue  # gone since it was listed
        if stat.S_ISDIR(info.st_mode):
            with _searchable(path, info.st_mode):
                _dump_directory(tar, path, f"{prefix}{name}/", device)


def _open(path: str, mode: int) -> int:
    try:
        return os.open(path, _READ)
    except PermissionError:
        os.chmod(path, stat.S_IMODE(mode) | 0o400)
        try:
            return os.open(path, _READ)
        finally:
            os.chmod(path, stat.S_IMODE(mode))


@contextlib.contextmanager
def _searchable(path: str, mode: int) -> Generator[None, None, None]:
    if mode & 0o500 == 0o500:
        yield
        return
    os.chmod(path, stat.S_IMODE(mode) | 0o500)
    try:
        yield
    finally:
        os.chmod(path, stat.S_IMODE(mode))


def restore(fd: int, root: str) -> None:
    """Unpack what `dump` wrote into `root`."""
    directories: list[tuple[str, int, float]] = []
    with (
        os.fdopen(fd, "rb", buffering=1 << 20) as file,
        tarfile.open(fileobj=file, mode="r|") as tar,
    ):
        if hasattr(tarfile, "fully_trusted_filter"):
            # This process reaches nothing but its own sandbox: a hostile archive gains nothing.
            tar.extraction_filter = staticmethod(tarfile.fully_trusted_filter)
        for member in tar:
            if member.isdir():
                directories.append((member.name, member.mode, member.mtime))
                member = copy.copy(member)
                member.mode = 0o700
                tar.extract(member, root, set_attrs=False)
            else:
                tar.extract(member, root, set_attrs=True, numeric_owner=True)
    # Last and from the inside out: a closed directory takes no files.
    for name, mode, modified in sorted(directories, reverse=True):
        path = os.path.join(root, name)
        os.utime(path, (modified, modified))
        os.chmod(path, mode)
