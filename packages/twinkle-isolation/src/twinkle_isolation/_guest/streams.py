"""The output and the input of programs: moved piece by piece, with a bound on what waits."""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import termios
from collections.abc import Callable

from twinkle_isolation._guest.files import Failure
from twinkle_isolation._guest.outbox import Outbox
from twinkle_isolation._guest.processes import Process

__all__ = ["Streams"]

_CHUNK_BYTES = 64 * 1024
_MAX_STDIN_BYTES = 8 << 20


class Streams:
    """Moves what programs print and read, as far as the other side keeps up.

    Args:
        outbox: Takes the output.
        selector: Calls when there is something to move.
        on_drained: Called when one output of a program is read to its end.
        on_flood: Called once for a program that prints more than it may.
    """

    def __init__(
        self,
        outbox: Outbox,
        selector: selectors.BaseSelector,
        *,
        on_drained: Callable[[Process], None],
        on_flood: Callable[[Process], None],
    ) -> None:
        self._outbox = outbox
        self._selector = selector
        self._on_drained = on_drained
        self._on_flood = on_flood

    def watch(self, process: Process) -> None:
        """Read the program's output, or stop reading it while somebody is behind."""
        wanted = not (self._outbox.throttled or process.held)
        watched = self._selector.get_map()
        for name, fd in process.streams.items():
            if wanted and fd not in watched:
                self._selector.register(
                    fd,
                    selectors.EVENT_READ,
                    lambda p=process, n=name, f=fd: self._on_output(p, n, f),
                )
            elif not wanted and fd in watched:
                self._selector.unregister(fd)

    def _on_output(self, process: Process, name: str, fd: int) -> None:
        """Move one piece of output to the host."""
        if process.duplex and process.pending and fd == process.stdin:
            self.write_stdin(process)
        if process.warm and fd == process.stdin:
            # What the program printed before it wrote here comes before it.
            self.drain(process)
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal whose last user is gone gives EIO
        if not data:
            self.close(process, name)
            self._on_drained(process)
            return
        self._take(process, name, data)

    def drain(self, process: Process) -> None:
        """Move the output that is there now, without the control channel's."""
        for name, fd in process.streams.items():
            if fd == process.stdin:
                continue
            (waiting,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
            while waiting > 0:
                data = os.read(fd, min(waiting, _CHUNK_BYTES))
                waiting -= len(data)
                self._take(process, name, data)

    def _take(self, process: Process, name: str, data: bytes) -> None:
        """Count a piece of output and send it."""
        process.output_bytes += len(data)
        limit = process.output_limit
        if limit is not None and process.output_bytes > limit:
            data = data[: max(0, len(data) - (process.output_bytes - limit))]
            process.output_bytes = limit
            if process.reason is None:
                self._on_flood(process)
        if data:
            self._outbox.send({"id": process.id, "ev": "data", "stream": name}, data)

    def close(self, process: Process, name: str) -> None:
        """Close one of a program's outputs."""
        fd = process.streams.pop(name)
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        if fd == process.stdin:
            process.stdin = None
        os.close(fd)

    def feed(self, process: Process, data: bytes) -> None:
        """Queue bytes for a program's input.

        Raises:
            Failure: Too much waits already.
        """
        if process.pending_bytes + len(data) > _MAX_STDIN_BYTES:
            waiting = process.pending_bytes
            raise Failure(
                "resource_exhausted", f"the program does not read its input: {waiting} bytes wait"
            )
        process.pending.append(data)
        process.pending_bytes += len(data)
        self.write_stdin(process)

    def write_stdin(self, process: Process) -> None:
        """Give the program what its input takes now."""
        fd = process.stdin
        if fd is None:
            return
        while process.pending:
            data = process.pending[0]
            try:
                written = os.write(fd, data)
            except BlockingIOError:
                break
            except OSError:  # nobody reads any more
                process.pending.clear()
                process.pending_bytes = 0
                break
            process.pending_bytes -= written
            if written == len(data):
                process.pending.popleft()
            else:
                process.pending[0] = data[written:]
        watched = fd in self._selector.get_map()
        if process.duplex:
            if watched:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.pending else 0)
                self._selector.modify(fd, events, self._selector.get_key(fd).data)
        elif process.pending:
            if not watched:
                self._selector.register(
                    fd, selectors.EVENT_WRITE, lambda p=process: self.write_stdin(p)
                )
        else:
            if watched:
                self._selector.unregister(fd)
            if process.close_stdin:
                self.drop_stdin(process)

    def drop_stdin(self, process: Process) -> None:
        """Close a program's input; a terminal's stays, it is the output too."""
        fd = process.stdin
        if fd is None or process.duplex:
            return
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        os.close(fd)
        process.stdin = None
        process.pending.clear()
