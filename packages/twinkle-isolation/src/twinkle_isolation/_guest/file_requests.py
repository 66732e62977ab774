"""The requests about files."""

from __future__ import annotations

import os
import selectors
from typing import Any

from twinkle_isolation._guest import files
from twinkle_isolation._guest.files import Failure, Paths
from twinkle_isolation._guest.guard import DiskWatch
from twinkle_isolation._guest.outbox import Outbox
from twinkle_isolation._guest.watch import Watches
from twinkle_isolation._wire import Message

__all__ = ["FileRequests"]

_CHUNK_BYTES = 256 * 1024
_ENTRIES_PER_FRAME = 500


class FileRequests:
    """Answer them; files that are read are sent piece by piece, between other work."""

    def __init__(
        self,
        paths: Paths,
        outbox: Outbox,
        selector: selectors.BaseSelector,
        disk: DiskWatch | None,
    ) -> None:
        self.paths = paths
        self.outbox = outbox
        self.selector = selector
        self.disk = disk
        self.reads: dict[int, tuple[int, int]] = {}  # request -> fd, bytes still allowed
        self.held: set[int] = set()
        self.held_watches: set[int] = set()
        self.writes: dict[int, int] = {}  # request -> fd
        self.watches = Watches(outbox.send, self.is_behind)

    def _where(self, message: Message, key: str = "path") -> str:
        return self.paths.resolve(str(message[key]), str(message.get("user", "user")))

    def op_stat(self, message: Message, body: bytes) -> Message:
        """Describe a path."""
        return files.stat_path(self._where(message))

    def op_list(self, message: Message, body: bytes) -> Message:
        """List a directory; entries come in parts."""
        part: list[dict[str, Any]] = []
        for entry in files.list_dir(self._where(message), int(message.get("depth", 1))):
            part.append(entry)
            if len(part) == _ENTRIES_PER_FRAME:
                self.outbox.send({"id": message["id"], "ev": "part", "entries": part})
                part = []
        return {"entries": part}

    def op_mkdir(self, message: Message, body: bytes) -> Message:
        """Make a directory."""
        return files.make_dir(self._where(message))

    def op_move(self, message: Message, body: bytes) -> Message:
        """Rename a path."""
        return files.move(self._where(message), self._where(message, "destination"))

    def op_remove(self, message: Message, body: bytes) -> Message:
        """Remove a path with all that is below it."""
        files.remove(self._where(message))
        return {}

    def op_read(self, message: Message, body: bytes) -> None:
        """Send a file's content as data events, then the result."""
        fd, size = files.open_read(self._where(message))
        self.reads[message["id"]] = (fd, int(message["limit"]))
        self.outbox.send({"id": message["id"], "ev": "start", "size": size})

    def op_cancel(self, message: Message, body: bytes) -> None:
        """Stop sending a file."""
        entry = self.reads.pop(message["target"], None)
        self.held.discard(message["target"])
        if entry is not None:
            os.close(entry[0])

    def hold(self, request_id: int, *, stop: bool) -> None:
        """Stop or go on sending one file, or the changes of one watch."""
        if stop and request_id in self.reads:
            self.held.add(request_id)
        elif stop and request_id in self.watches.roots:
            self.held_watches.add(request_id)
        else:
            self.held.discard(request_id)
            self.held_watches.discard(request_id)

    def is_behind(self, request_id: int) -> bool:
        """Whoever reads a watch does not keep up."""
        return self.outbox.throttled or request_id in self.held_watches

    @property
    def busy(self) -> bool:
        """A piece of a file can be sent now."""
        return not self.outbox.throttled and len(self.reads) > len(self.held)

    def pump(self) -> None:
        """Send one more piece of each file that is being read, and what watches missed."""
        if self.watches.lost:
            self.watches.tell_lost()
        for request_id in list(self.reads):
            if self.outbox.throttled:
                return
            if request_id in self.held:
                continue
            fd, left = self.reads[request_id]
            try:
                data = os.read(fd, min(_CHUNK_BYTES, left + 1))
                if len(data) > left:
                    raise Failure(
                        "resource_exhausted", "the file is longer than the request's limit"
                    )
            except (OSError, Failure) as error:
                self.outbox.send_error(request_id, error)
            else:
                if data:
                    self.reads[request_id] = (fd, left - len(data))
                    self.outbox.send({"id": request_id, "ev": "data"}, data)
                    continue
                self.outbox.send({"id": request_id, "ev": "result", "value": {}})
            del self.reads[request_id]
            os.close(fd)

    def op_write(self, message: Message, body: bytes) -> Message | None:
        """Write a file; with `more`, the rest comes in `chunk` messages."""
        self.writes[message["id"]] = files.open_write(self._where(message), message.get("mode"))
        return self.op_chunk(message, body)

    def op_chunk(self, message: Message, body: bytes) -> Message | None:
        """Write one more piece of a file."""
        fd = self.writes.get(message["id"])
        if fd is None:
            return None  # failed before; the error was sent
        try:
            if self.disk is not None and body and self.disk.over(len(body)):
                raise Failure("no_space", "the sandbox's files are over its disk limit")
            view = memoryview(body)
            while view:
                view = view[os.write(fd, view) :]
        except (OSError, Failure):
            os.close(self.writes.pop(message["id"]))
            raise
        if message.get("more"):
            return None
        os.close(self.writes.pop(message["id"]))
        return {}

    def op_watch(self, message: Message, body: bytes) -> None:
        """Begin to send what changes below a directory."""
        if self.watches.fd is None:
            fd = self.watches.open()
            self.selector.register(fd, selectors.EVENT_READ, self.watches.on_readable)
        recursive = bool(message.get("recursive"))
        self.watches.add(message["id"], self._where(message), recursive=recursive)
        self.outbox.send({"id": message["id"], "ev": "start"})

    def op_unwatch(self, message: Message, body: bytes) -> Message:
        """Stop watching."""
        self.watches.remove(message["target"])
        self.held_watches.discard(message["target"])
        self.outbox.send({"id": message["target"], "ev": "end"})
        return {}
