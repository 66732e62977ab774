"""The writable files of a sandbox as one tar stream: the whole of a snapshot."""

from __future__ import annotations

import copy
import os
import stat
import tarfile

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
        device = os.lstat(root).st_dev
        levels = [_Level(root, "")]  # no recursion: a program may nest directories deeply
        try:
            while levels:
                name = next(levels[-1].names, None)
                if name is None:
                    levels.pop().close()
                    continue
                prefix, path = levels[-1].prefix, os.path.join(levels[-1].path, name)
                mode = _dump_one(tar, path, prefix + name, device)
                if mode is not None and stat.S_ISDIR(mode):
                    levels.append(_Level(path, f"{prefix}{name}/", mode))
        finally:
            for level in reversed(levels):
                level.close()


class _Level:
    """A directory that is being dumped; its owner may search it meanwhile."""

    def __init__(self, path: str, prefix: str, mode: int = 0o500) -> None:
        self.path = path
        self.prefix = prefix
        self.closed_mode = None if mode & 0o500 == 0o500 else stat.S_IMODE(mode)
        if self.closed_mode is not None:
            os.chmod(path, self.closed_mode | 0o500)
        self.names = iter(sorted(os.listdir(path)))

    def close(self) -> None:
        if self.closed_mode is not None:
            os.chmod(self.path, self.closed_mode)


def _dump_one(tar: tarfile.TarFile, path: str, name: str, device: int) -> int | None:
    """Add one file, or a directory without what is in it; return its mode where it was added."""
    try:
        info = os.lstat(path)
        if info.st_dev != device or stat.S_ISSOCK(info.st_mode):
            return None
        member = tar.gettarinfo(path, name)
        if member.isreg():
            with os.fdopen(_open(path, info.st_mode), "rb") as file:
                tar.addfile(member, file)
        else:
            tar.addfile(member)
    except FileNotFoundError:
        return None  # removed since it was listed
    return info.st_mode


def _open(path: str, mode: int) -> int:
    try:
        return os.open(path, _READ)
    except PermissionError:
        os.chmod(path, stat.S_IMODE(mode) | 0o400)
        try:
            return os.open(path, _READ)
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
