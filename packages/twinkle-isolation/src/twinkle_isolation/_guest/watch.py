"""Directory watches (inotify), as events of the kinds create, write, remove, rename and chmod."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any

from twinkle_isolation._guest.files import Failure

__all__ = ["Watches"]

_IN_MODIFY = 0x2
_IN_ATTRIB = 0x4
_IN_MOVED_FROM = 0x40
_IN_MOVED_TO = 0x80
_IN_CREATE = 0x100
_IN_DELETE = 0x200
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x1000000
_IN_ISDIR = 0x40000000
_MASK = _IN_MODIFY | _IN_ATTRIB | _IN_MOVED_FROM | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE
_EVENT = struct.Struct("iIII")
_KINDS = {
    _IN_CREATE: "create",
    _IN_MODIFY: "write",
    _IN_DELETE: "remove",
    _IN_MOVED_FROM: "rename",
    _IN_MOVED_TO: "create",
    _IN_ATTRIB: "chmod",
}
_MAX_DIRECTORIES = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class Watches:
    """All watches of one sandbox, on one inotify descriptor.

    While a reader is behind, its changes are dropped, and then it is told so (`overflow`).
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], None], is_behind: Callable[[int], bool]
    ) -> None:
        self.send = send
        self.is_behind = is_behind
        self.lost: set[int] = set()  # watch ids with dropped changes that were not told yet
        self.fd: int | None = None
        self.roots: dict[int, tuple[str, bool]] = {}  # watch id -> directory, recursive
        self.directories: dict[int, tuple[str, set[int]]] = {}  # kernel's number -> path, watch ids

    def open(self) -> int:
        """Make the descriptor."""
        fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.fd = fd
        return fd

    def add(self, number: int, path: str, *, recursive: bool) -> None:
        """Watch a directory.

        Raises:
            Failure: The path is not a directory, or too many directories are watched.
        """
        os.stat(path)
        if not os.path.isdir(path):
            raise Failure("invalid_argument", f"path is not a directory: {path!r}")
        self.roots[number] = (path, recursive)
        try:
            self.add_directory(number, path)
            if recursive:
                for parent, names, _ in os.walk(path):
                    for name in names:
                        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                            self.add_directory(number, os.path.join(parent, name))
        except BaseException:
            self.remove(number)
            raise

    def add_directory(self, number: int, path: str) -> None:
        if len(self.directories) >= _MAX_DIRECTORIES:
            raise Failure(
                "resource_exhausted", f"more than {_MAX_DIRECTORIES} directories are watched"
            )
        descriptor = _libc.inotify_add_watch(self.fd, os.fsencode(path), _MASK | _IN_ONLYDIR)
        if descriptor < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), path)
        self.directories.setdefault(descriptor, (path, set()))[1].add(number)

    def remove(self, number: int) -> None:
        """Stop one watch; an unknown one is stopped already."""
        self.roots.pop(number, None)
        self.lost.discard(number)
        for descriptor, (_, numbers) in list(self.directories.items()):
            numbers.discard(number)
            if not numbers:
                del self.directories[descriptor]
                _libc.inotify_rm_watch(self.fd, descriptor)

    def on_readable(self) -> None:
        """Send the events that are there."""
        assert self.fd is not None
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            descriptor, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + length].rstrip(b"\0").decode(errors="surrogateescape")
            at += length
            if mask & _IN_Q_OVERFLOW:
                self.lost |= self.roots.keys()
            elif mask & _IN_IGNORED:
                self.directories.pop(descriptor, None)
            elif descriptor in self.directories:
                self.tell(*self.directories[descriptor], mask, name)

    def tell_lost(self) -> None:
        """Tell the readers that are not behind any more what they missed."""
        for number in [number for number in self.lost if not self.is_behind(number)]:
            self.lost.discard(number)
            self.send({"id": number, "ev": "fs", "kind": "overflow", "name": ""})

    def tell(self, directory: str, numbers: set[int], mask: int, name: str) -> None:
        path = os.path.join(directory, name) if name else directory
        for number in list(numbers):
            root, recursive = self.roots[number]
            if recursive and mask & _IN_ISDIR and mask & (_IN_CREATE | _IN_MOVED_TO):
                with contextlib.suppress(OSError, Failure):
                    self.add_directory(number, path)
            if number in self.lost or self.is_behind(number):
                self.lost.add(number)
                continue
            shown = os.path.relpath(path, root)
            for bit, kind in _KINDS.items():
                if mask & bit:
                    self.send({"id": number, "ev": "fs", "kind": kind, "name": shown, "path": path})
