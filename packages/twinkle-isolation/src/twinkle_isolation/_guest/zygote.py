"""The warm process that every sandbox is forked from.

It starts once, imports what a supervisor needs, and then forks on request. A request is one
message on a `SOCK_SEQPACKET` socket, with file descriptors attached; the answer comes from the new
process itself. It ends, and everything it started ends with it, when its socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from types import FrameType
from typing import Any, NoReturn

from twinkle_isolation._guest import linux, process_tree, rootfs, warm
from twinkle_isolation._guest.layout import JailLayout
from twinkle_isolation._guest.seccomp import filter_for
from twinkle_isolation._guest.supervisor import Supervisor

__all__ = ["main"]

_MAX_REQUEST_BYTES = 1 << 18
_MAX_FDS = 8


def main() -> None:
    """Serve create requests on file descriptor `sys.argv[1]` until it closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request, _, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 0)
    config = json.loads(request)
    if config["preload"]:
        warm.prepare(config["paths"], config["preload"])
    zygote = _Zygote(control, config)
    if config["namespaces"]:
        _import_no_more()
    control.send(json.dumps({"ready": True}).encode())
    zygote.serve()


def _import_no_more() -> None:
    """Take this package's directory off the search path: in a sandbox, programs may write there."""
    sys.path.remove(sys.argv[2])
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "twinkle_isolation" and hasattr(module, "__path__"):
            module.__path__ = []


class _Zygote:
    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.namespaces: bool = config["namespaces"]
        self.config = config
        self.layout = JailLayout.read(config["shares"]) if self.namespaces else JailLayout()
        self.supervisors: set[int] = set()
        if not self.namespaces:
            linux.set_child_subreaper()
            linux.set_parent_death_signal(signal.SIGTERM)
        for accounted in (False, True):
            filter_for(os.uname().machine, accounted=accounted)
        gc.collect()
        gc.freeze()

    def serve(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, linux.ignore_signal)
        signal.signal(signal.SIGTERM, self.on_term)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self.reap()
                    continue
                request, fds, _, _ = socket.recv_fds(self.control, _MAX_REQUEST_BYTES, _MAX_FDS)
                if not request:
                    self.close()
                self.create(json.loads(request), fds)
                for received in fds:
                    os.close(received)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.supervisors:
                    self.supervisors.discard(pid)
                    if not self.namespaces:
                        process_tree.kill_children(os.getpid(), spare=self.supervisors)

    def close(self) -> NoReturn:
        """End every sandbox; with namespaces the kernel does it when this process ends."""
        if not self.namespaces:
            process_tree.kill_descendants(os.getpid())
        os._exit(0)

    def on_term(self, number: int, frame: FrameType | None) -> None:
        """The parent died, or wants us to end."""
        self.close()

    def create(self, request: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self.answer(request["id"], error=str(error))
            return
        if pid:
            if not self.namespaces:
                self.supervisors.add(pid)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.become_supervisor(request, fds)
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.answer(request["id"], error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)

    def answer(
        self, request_id: int, *, error: str | None = None, pid: int = 0, pidfd: int | None = None
    ) -> None:
        message = json.dumps({"id": request_id, "error": error, "pid": pid}).encode()
        socket.send_fds(self.control, [message], [] if pidfd is None else [pidfd])

    def become_supervisor(self, request: dict[str, Any], fds: list[int]) -> None:
        sandbox = request["sandbox"]
        channel, *rest = fds
        archive = rest.pop(0) if sandbox["archive"] else None
        for cgroup in rest:
            os.write(cgroup, b"0")
        rootfs.become_user(sandbox["uid"], sandbox["gid"])
        if self.namespaces:
            rootfs.enter_namespaces(network=sandbox["network"])
            ready_read, ready_write = os.pipe()
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid:
                os.close(ready_write)
                socket.send_fds(ours, [b"r"], [rootfs.make_root_user(sandbox["processes"] + 1)])
                failure = os.read(ready_read, 4096)
                if failure:
                    self.answer(request["id"], error=failure.decode(errors="replace"))
                else:
                    self.answer(request["id"], pid=pid, pidfd=os.pidfd_open(pid))
                os._exit(0)
            os.close(ready_read)
            self.control.close()
            ours.close()  # so that the other's end is noticed
            try:
                _, (root,), _, _ = socket.recv_fds(theirs, 1, 1)
                rootfs.enter_root(self.layout, sandbox)
                supervisor = self.prepare(sandbox, channel, archive, ready_write, root)
            except BaseException as error:
                os.write(ready_write, f"{type(error).__name__}: {error}".encode()[:4096])
                os._exit(1)
            os.close(ready_write)
        else:
            linux.set_parent_death_signal(signal.SIGKILL)
            linux.set_child_subreaper()
            os.setsid()
            supervisor = self.prepare(sandbox, channel, archive, self.control.fileno(), None)
            pid = os.getpid()
            self.answer(request["id"], pid=pid, pidfd=os.pidfd_open(pid))
            self.control.close()
        supervisor.run()

    def prepare(
        self,
        sandbox: dict[str, Any],
        channel: int,
        archive: int | None,
        keep: int,
        root_namespace: int | None,
    ) -> Supervisor:
        connection = socket.socket(fileno=os.dup(channel))
        supervisor = Supervisor(connection, sandbox, root_namespace=root_namespace)
        kept = {connection.fileno(), keep, archive, root_namespace}
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        linux.close_descriptors({0, 1, 2, *(fd for fd in kept if fd is not None)})
        supervisor.set_up(archive)
        return supervisor
