"""File operations, done by the supervisor inside the sandbox.

A path means here what it means to the sandbox's own programs. Nothing is opened that can block:
every open is `O_NONBLOCK`, and only regular files are read or written.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Any

from twinkle_isolation._guest import linux
from twinkle_isolation._guest.trees import remove_tree

__all__ = [
    "Failure",
    "Paths",
    "failure_of",
    "list_dir",
    "make_dir",
    "move",
    "open_read",
    "open_write",
    "remove",
    "stat_path",
]

_OPEN = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# File systems that are an interface to the kernel (linux/magic.h): there the supervisor has rights
# over itself that no program may borrow.
_KERNEL_FILE_SYSTEMS = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x73636673: "securityfs",
    0xCAFE4A11: "bpf",
}
_MAX_DEPTH = 64
_MAX_ENTRIES = 50_000  # of one list, all of which the host has to hold
_MAX_LIST_BYTES = 8 << 20  # of names, paths and targets, with a share for the rest of each entry
_BYTES_PER_ENTRY = 100

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "invalid_argument",
    errno.EISDIR: "invalid_argument",
    errno.ELOOP: "invalid_argument",
    errno.ENAMETOOLONG: "invalid_argument",
    errno.EINVAL: "invalid_argument",
    errno.EXDEV: "invalid_argument",
    errno.ENOTEMPTY: "failed_precondition",
    errno.EBUSY: "failed_precondition",
    errno.ETXTBSY: "failed_precondition",
    errno.EMLINK: "failed_precondition",
    errno.ENXIO: "invalid_argument",
    errno.ENODEV: "invalid_argument",
    errno.EOPNOTSUPP: "invalid_argument",
    errno.EEXIST: "already_exists",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EAGAIN: "resource_exhausted",
    errno.EMFILE: "resource_exhausted",
    errno.ENFILE: "resource_exhausted",
    errno.ENOMEM: "resource_exhausted",
}


class Failure(Exception):
    """A request that cannot be done; `code` is an `ErrorCode` of `twinkle_isolation.errors`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def failure_of(error: BaseException) -> Failure:
    """Return the failure that tells the host about `error`."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        text = os.strerror(error.errno)
        where = f" {os.fsdecode(error.filename)!r}" if error.filename is not None else ""
        return Failure(_CODES.get(error.errno, "internal"), f"{text}{where}")
    if isinstance(error, ValueError):
        return Failure("invalid_argument", str(error))
    return Failure("internal", f"{type(error).__name__}: {error}")


class Paths:
    """Turn the paths of requests into absolute ones.

    Without a root directory of its own (`base` given) a sandbox keeps its home directories below
    `base`.
    """

    def __init__(self, base: str | None) -> None:
        self.base = base
        self.homes = {
            "user": "/home/user" if base is None else f"{base}/home/user",
            "root": "/root" if base is None else f"{base}/root",
        }

    def home(self, user: str) -> str:
        """Return the home directory of `user`.

        Raises:
            Failure: There is no such user.
        """
        home = self.homes.get(user)
        if home is None:
            raise Failure(
                "invalid_argument", f"user {user!r} not found: the users are {sorted(self.homes)}"
            )
        return home

    def resolve(self, path: str, user: str) -> str:
        """Return `path` made absolute and normal; `~` and relative ones start at the home."""
        if "\0" in path:
            raise Failure("invalid_argument", f"path {path!r} holds a null character")
        home = self.home(user)
        if path == "~" or path.startswith("~/"):
            path = home + path[1:]
        path = os.path.normpath(os.path.join(home, path))
        if path.startswith("//"):
            path = path[1:]
        if self.base is not None:
            for name, virtual in (("user", "/home/user"), ("root", "/root")):
                if path == virtual or path.startswith(virtual + "/"):
                    return self.homes[name] + path[len(virtual) :]
        return path


def _entry(path: str) -> dict[str, Any]:
    info = os.lstat(path)
    kind = info.st_mode
    target: str | None = None
    if stat.S_ISLNK(kind):
        name = "symlink"
        target = os.readlink(path)
    elif stat.S_ISDIR(kind):
        name = "dir"
    elif stat.S_ISREG(kind):
        name = "file"
    else:
        name = "other"
    return {
        "name": os.path.basename(path) or "/",
        "type": name,
        "path": path,
        "size": info.st_size,
        "mode": stat.S_IMODE(kind),
        "permissions": stat.filemode(kind),
        "owner": _owner(info.st_uid),
        "group": _owner(info.st_gid),
        "modified_ns": info.st_mtime_ns,
        "target": target,
    }


def _owner(number: int) -> str:
    # The host's files belong to users that this sandbox has no number for.
    return {1000: "user", os.getuid(): "user"}.get(number, "root")


def stat_path(path: str) -> dict[str, Any]:
    """Describe one path, links not followed."""
    return _entry(path)


def list_dir(path: str, depth: int) -> Iterator[dict[str, Any]]:
    """Yield what is below a directory, `depth` levels deep, in the order of names."""
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise Failure("invalid_argument", f"path is not a directory: {path!r}")
    _refuse_kernel_path(path)
    if not 1 <= depth <= _MAX_DEPTH:
        raise Failure("invalid_argument", f"depth {depth} is outside 1..{_MAX_DEPTH}")
    size = 0
    for number, entry in enumerate(_walk(path, depth)):
        size += _BYTES_PER_ENTRY + sum(len(entry[key] or "") for key in ("name", "path", "target"))
        if number >= _MAX_ENTRIES or size > _MAX_LIST_BYTES:
            most = f"{_MAX_ENTRIES} entries" if number >= _MAX_ENTRIES else "8 MiB of names"
            raise Failure(
                "invalid_argument",
                f"more than {most} below {path!r}: ask for fewer levels, or list them with a "
                "command",
            )
        yield entry


def _walk(path: str, depth: int) -> Iterator[dict[str, Any]]:
    for name in sorted(os.listdir(path)):
        child = os.path.join(path, name)
        try:
            entry = _entry(child)
        except FileNotFoundError:
            continue  # gone since it was listed
        yield entry
        if depth > 1 and entry["type"] == "dir":
            try:
                _refuse_kernel_path(child)
                yield from _walk(child, depth - 1)
            except (OSError, Failure):
                continue  # a directory that cannot be read is listed, its content is not


def make_dir(path: str) -> dict[str, Any]:
    """Make a directory and its parents."""
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        _make_dirs(path)
        return _entry(path)
    if stat.S_ISDIR(kind):
        raise Failure("already_exists", f"directory already exists: {path!r}")
    raise Failure("invalid_argument", f"path exists and is not a directory: {path!r}")


def _make_dirs(path: str) -> None:
    """Make a directory with its parents; `os.makedirs` does that by recursion."""
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            os.mkdir(directory)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise


def move(source: str, destination: str) -> dict[str, Any]:
    """Rename a file or directory; the parents of the destination are made."""
    os.lstat(source)
    _make_dirs(os.path.dirname(destination))
    os.rename(source, destination)
    return _entry(destination)


def remove(path: str) -> None:
    """Remove a file, link or whole directory; a path that is not there is removed already."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        try:
            shutil.rmtree(path)
        except RecursionError:  # what is left of it is too deep for that
            remove_tree(path)
    else:
        os.unlink(path)


def open_read(path: str) -> tuple[int, int]:
    """Open a regular file; return the file descriptor and the size that it has now."""
    fd = os.open(path, os.O_RDONLY | _OPEN)
    return fd, _check_regular(fd, path)


def open_write(path: str, mode: int | None) -> int:
    """Open a regular file for writing, made with its parents or emptied."""
    _make_dirs(os.path.dirname(path))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN, 0o644)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a fifo that nobody reads
            raise Failure("invalid_argument", f"path is not a regular file: {path!r}") from error
        raise
    _check_regular(fd, path)
    if mode is not None:
        os.fchmod(fd, mode)
    return fd


def _check_regular(fd: int, path: str) -> int:
    """Return the size of an open regular file; close any other, and what the kernel serves."""
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            kind = "is a directory" if stat.S_ISDIR(info.st_mode) else "is not a regular file"
            raise Failure("invalid_argument", f"path {kind}: {path!r}")
        _refuse_kernel(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return info.st_size


def _refuse_kernel_path(path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _refuse_kernel(fd, path)
    finally:
        os.close(fd)


def _refuse_kernel(fd: int, path: str) -> None:
    # Checked on the open file, so no link and no rename leads around it.
    name = _KERNEL_FILE_SYSTEMS.get(linux.filesystem_type(fd))
    if name is not None:
        raise Failure(
            "permission_denied",
            f"path {path!r} is on {name}, which file operations do not serve: use a command",
        )
