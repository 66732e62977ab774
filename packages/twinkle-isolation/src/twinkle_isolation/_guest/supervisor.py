"""The one trusted process inside each sandbox: it starts programs, moves output, serves files.

A single-threaded event loop. What the sandbox's programs do holds it for a few seconds at most (a
program that others stop before it begins); a long file operation holds it as long as that takes,
and the host ends a sandbox whose supervisor is silent too long. It bounds what it buffers, and
ends, with everything in the sandbox, when the connection to the host closes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from twinkle_isolation._guest import archive, linux, process_tree
from twinkle_isolation._guest.file_requests import FileRequests
from twinkle_isolation._guest.files import Failure, Paths
from twinkle_isolation._guest.guard import DiskWatch
from twinkle_isolation._guest.outbox import Outbox
from twinkle_isolation._guest.process_requests import ProcessRequests
from twinkle_isolation._guest.processes import Launch
from twinkle_isolation._guest.seccomp import filter_for
from twinkle_isolation._wire import FrameBuffer, FrameError, Message

__all__ = ["Supervisor"]

_RECEIVE_BYTES = 1 << 18
_OWN_FILES = 8192

Handler = Callable[[Message, bytes], "Message | None"]


class Supervisor:
    """Serve one sandbox until the host closes `channel`."""

    def __init__(
        self, channel: socket.socket, sandbox: dict[str, Any], *, root_namespace: int | None
    ) -> None:
        self.channel = channel
        self.sandbox = sandbox
        self.root_namespace = root_namespace
        namespaces = self.namespaces = root_namespace is not None
        self.base: str | None = None if namespaces else sandbox["directory"]

    def set_up(self, archive_fd: int | None) -> None:
        """Prepare for the first request: limits, privileges, restored files."""
        if self.base is not None:
            for name in ("home/user", "root", "tmp"):
                os.makedirs(f"{self.base}/{name}", exist_ok=True)
        self.limit_resources()
        linux.forbid_new_privileges()
        linux.drop_capabilities()
        launch = Launch.prepare(
            root_namespace=self.root_namespace,
            syscalls=filter_for(os.uname().machine, accounted=bool(self.sandbox["accounted"])),
            open_files=int(self.sandbox["open_files"]),
        )
        linux.set_dumpable(False)
        if archive_fd is not None:
            archive.restore(archive_fd, self.base or "/")
        os.chdir(self.base or "/")
        self.channel.setblocking(False)
        self.frames = FrameBuffer()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.channel, selectors.EVENT_READ, self.on_channel)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wake_fd = wake_read
        signal.signal(signal.SIGCHLD, linux.ignore_signal)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, self.on_wake)
        self.outbox = Outbox(self.channel)
        paths = Paths(self.base)
        disk = None
        if self.base is not None:
            disk = DiskWatch(self.base, self.sandbox["disk_bytes"])
        self.files = FileRequests(paths, self.outbox, self.selector, disk)
        self.programs = ProcessRequests(
            self.sandbox,
            paths,
            self.outbox,
            self.selector,
            launch=launch,
            disk=disk,
        )
        self.handlers: dict[str, Handler] = {"flow": self.op_flow, "ping": self.op_ping}
        for owner in (self.files, self.programs):
            for name in dir(owner):
                if name.startswith("op_"):
                    self.handlers[name.removeprefix("op_")] = getattr(owner, name)

    def limit_resources(self) -> None:
        """Set the limits that every process of the sandbox inherits."""
        wanted = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_DATA: self.sandbox["memory_bytes"],
            resource.RLIMIT_NOFILE: _OWN_FILES,  # programs get less, see `processes`
            resource.RLIMIT_MEMLOCK: 64 * 1024,
            resource.RLIMIT_MSGQUEUE: 800 * 1024,
            resource.RLIMIT_SIGPENDING: 1024,
        }
        if self.sandbox["file_bytes"] is not None:
            wanted[resource.RLIMIT_FSIZE] = self.sandbox["file_bytes"]
        if self.namespaces:
            # Counted per user namespace, so this is the sandbox's own; one is the supervisor.
            wanted[resource.RLIMIT_NPROC] = self.sandbox["processes"] + 1
        for kind, value in wanted.items():
            _, hard = resource.getrlimit(kind)
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))

    def run(self) -> None:
        """Serve until the host hangs up."""
        try:
            while True:
                for key, _ in self.selector.select(self.delay()):
                    key.data()
                self.files.pump()
                self.programs.on_time()
                self.outbox.flush()
                self.watch_channel()
        except (FrameError, ConnectionError, EOFError):
            pass
        finally:
            if not self.namespaces:
                process_tree.kill_descendants(os.getpid())
            os._exit(0)

    def delay(self) -> float | None:
        """Return how long the loop may sleep."""
        if self.files.busy:
            return 0
        due = self.programs.due()
        return None if due is None else max(0.0, due - time.monotonic())

    def on_wake(self) -> None:
        """A child ended."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        self.programs.reap()

    def watch_channel(self) -> None:
        """Wait for room on the connection while something waits to be sent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outbox.waiting else 0)
        if self.selector.get_key(self.channel).events != events:
            self.selector.modify(self.channel, events, self.on_channel)

    def on_channel(self) -> None:
        """Read requests and answer them."""
        try:
            data = self.channel.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        for message, body in self.frames.feed(data):
            self.dispatch(message, body)

    def dispatch(self, message: Message, body: bytes) -> None:
        """Answer one request."""
        try:
            handler = self.handlers.get(str(message.get("op")))
            if handler is None:
                raise Failure("unimplemented", f"unknown operation {message.get('op')!r}")
            result = handler(message, body)
        except Exception as error:
            self.outbox.send_error(message.get("id"), error)
        else:
            if result is not None:
                self.outbox.send({"id": message["id"], "ev": "result", "value": result})

    def op_ping(self, message: Message, body: bytes) -> Message:
        """Say that this process is not stuck."""
        return {}

    def op_flow(self, message: Message, body: bytes) -> None:
        """Stop or go on sending the data of one request."""
        request_id, stop = int(message["target"]), bool(message["stop"])
        if not self.programs.hold(request_id, stop=stop):
            self.files.hold(request_id, stop=stop)
