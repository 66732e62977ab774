"""The requests about programs, and what happens to programs by themselves."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from typing import Any, NoReturn

from twinkle_isolation._guest import archive, linux, processes
from twinkle_isolation._guest.files import Failure, Paths
from twinkle_isolation._guest.guard import INTERVAL_S, DiskWatch, Guard
from twinkle_isolation._guest.outbox import Outbox
from twinkle_isolation._guest.process_tree import ProcessTree
from twinkle_isolation._guest.processes import Launch, Process
from twinkle_isolation._guest.streams import Streams
from twinkle_isolation._wire import Message

__all__ = ["ProcessRequests"]

_END_GRACE_S = 0.5
_MAX_PROCESSES = 256  # started on request and not ended


class ProcessRequests:
    """Start programs, answer what is asked about them, and end those that are over a limit."""

    def __init__(
        self,
        sandbox: dict[str, Any],
        paths: Paths,
        outbox: Outbox,
        selector: selectors.BaseSelector,
        *,
        launch: Launch,
        disk: DiskWatch | None,
    ) -> None:
        self.launch = launch
        namespaces = self.namespaces = launch.root_namespace is not None
        self.paths = paths
        self.outbox = outbox
        self.streams = Streams(
            outbox,
            selector,
            on_drained=self.end_if_done,
            on_flood=lambda process: self.kill(process, "output"),
        )
        self.env: dict[str, str] = {str(k): str(v) for k, v in sandbox["env"].items()}
        self.guard = Guard(
            memory_bytes=sandbox["memory_bytes"],
            processes=sandbox["processes"],
            namespaces=namespaces,
            disk=disk,
        )
        self.tree = ProcessTree()
        self.processes: dict[int, Process] = {}
        self.by_pid: dict[int, Process] = {}
        self.guard_at: float | None = None
        self.paused_at: float | None = None
        outbox.on_change = self.watch_all

    # Time

    def due(self) -> float | None:
        """Return when something has to be done next."""
        times = [] if self.guard_at is None else [self.guard_at]
        times += [
            p.deadline
            for p in self.processes.values()
            if p.deadline is not None and self.clock_runs(p)
        ]
        times += [p.force_end_at for p in self.processes.values() if p.force_end_at is not None]
        return min(times) if times else None

    def clock_runs(self, process: Process) -> bool:
        """Return whether the time of a program passes now."""
        return self.paused_at is None or not process.pauses

    def on_time(self) -> None:
        """Do what is due now: deadlines, the guard, ends that are forced."""
        if self.guard_at is None and not self.processes:
            return
        now = time.monotonic()
        for process in list(self.processes.values()):
            over = process.deadline is not None and process.deadline <= now
            if over and self.clock_runs(process):
                process.deadline = None
                self.kill(process, "timeout")
            if process.force_end_at is not None and process.force_end_at <= now:
                self.end(process)
        if self.guard_at is not None and self.guard_at <= now:
            self.look_at_tree()
            busy, killed = self.guard.check()
            for session, reason in killed.items():
                process = self.by_pid.get(session)
                if process is not None and process.reason is None:
                    process.reason = reason
            self.guard_at = now + INTERVAL_S if busy or self.processes else None

    def reap(self) -> None:
        """Take note of the children that ended, adopted ones too."""
        ended: list[Process] = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                process = self.by_pid.pop(pid, None)
                if process is not None:
                    process.status = status
                    ended.append(process)
        # Of several that ended together it cannot be told whose their orphans are.
        self.look_at_tree(adopted_from=ended[0].pid if len(ended) == 1 else None)
        for process in ended:
            self.streams.drop_stdin(process)
            if process.reason is not None or process.warm:
                # What left the killed group may hold the output open for ever.
                process.force_end_at = time.monotonic() + _END_GRACE_S
            self.end_if_done(process)

    def look_at_tree(self, *, adopted_from: int | None = None) -> None:
        """Note which processes came from which program."""
        programs = (process.pid for process in self.processes.values())
        self.tree.look(programs, adopted_from=adopted_from)

    # Starting and ending

    def op_exec(self, message: Message, body: bytes) -> None:
        """Start a program; its output and end follow as events under the request's id."""
        if len(self.processes) >= _MAX_PROCESSES:
            raise Failure("resource_exhausted", f"{_MAX_PROCESSES} programs are running already")
        user = message.setdefault("user", "user")
        home = self.paths.home(user)
        cwd = self.paths.resolve(message.get("cwd") or home, user)
        env = self.env | {"HOME": home, "USER": user, "LOGNAME": user}
        if self.paths.base is not None:
            env.setdefault("TMPDIR", f"{self.paths.base}/tmp")
        if message.get("pty"):
            env.setdefault("TERM", "xterm-256color")
        env |= {str(k): str(v) for k, v in message.get("env", {}).items()}
        now = time.monotonic()
        process = processes.start(message, env, cwd, launch=self.launch, now=now)
        self.outbox.send({"id": process.id, "ev": "start", "pid": process.pid})
        self.add(process)
        if self.guard_at is None:
            self.guard_at = now + INTERVAL_S

    def add(self, process: Process) -> None:
        """Take a new process into the books."""
        self.processes[process.id] = process
        self.by_pid[process.pid] = process
        self.streams.watch(process)

    def op_dump(self, message: Message, body: bytes) -> None:
        """Send every writable file as one tar stream, as if a program printed it. Pause first."""
        timeout_s = float(message["timeout_s"])
        reader, writer = os.pipe2(os.O_CLOEXEC)
        trouble_reader, trouble_writer = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
            if pid == 0:
                self.dump(writer, trouble_writer)
        except OSError:
            os.close(reader)
            os.close(trouble_reader)
            raise
        finally:
            os.close(writer)
            os.close(trouble_writer)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does it too; whoever is first
        for fd in (reader, trouble_reader):
            os.set_blocking(fd, False)
        process = Process(
            id=message["id"],
            pid=pid,
            pty=False,
            streams={"archive": reader, "trouble": trouble_reader},
            stdin=None,
            deadline=time.monotonic() + timeout_s,
            output_limit=None,
            pauses=False,
        )
        self.add(process)

    def dump(self, writer: int, trouble: int) -> NoReturn:
        """Write every file to `writer` (in a forked child), or to `trouble` why that failed."""
        try:
            os.setpgid(0, 0)
            linux.close_descriptors({0, 1, 2, writer, trouble})
            archive.dump(writer, self.paths.base or "/")
        except BaseException as error:
            os.write(trouble, f"{type(error).__name__}: {error}".encode(errors="replace")[:4000])
            os._exit(1)
        os._exit(0)

    def kill(self, process: Process, reason: str | None) -> None:
        """Kill the program, because of a limit or on demand: its group, and all it started."""
        process.reason = reason
        if process.status is None:  # else it forks no more, and its number may be another's
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGSTOP)
        self.tree.kill(process.pid, (p.pid for p in self.processes.values()))
        process.signal(signal.SIGKILL)
        process.force_end_at = time.monotonic() + _END_GRACE_S

    def end_if_done(self, process: Process) -> None:
        """Tell the end once the program has ended and its output is read to the last byte."""
        if process.status is not None and not process.streams:
            self.end(process)

    def end(self, process: Process) -> None:
        """Tell the end now."""
        if process.warm:
            self.streams.drain(process)
        for name in list(process.streams):
            self.streams.close(process, name)
        self.streams.drop_stdin(process)
        self.processes.pop(process.id, None)
        self.by_pid.pop(process.pid, None)
        code = None if process.status is None else os.waitstatus_to_exitcode(process.status)
        self.outbox.send(
            {
                "id": process.id,
                "ev": "end",
                "exit_code": code if code is not None and code >= 0 else -1,
                "signal": -code if code is not None and code < 0 else None,
                "reason": process.reason,
            }
        )

    # Output

    def watch_all(self) -> None:
        """Apply a change of the outbox to all programs."""
        for process in self.processes.values():
            self.streams.watch(process)

    def hold(self, request_id: int, *, stop: bool) -> bool:
        """Stop or go on reading one program's output; False when there is no such program."""
        process = self.processes.get(request_id)
        if process is None:
            return False
        process.held = stop
        self.streams.watch(process)
        return True

    # Input and signals

    def find(self, message: Message) -> Process:
        """Return the program that a request is about.

        Raises:
            Failure: It has ended.
        """
        process = self.processes.get(message["process"])
        if process is None:
            raise Failure("not_found", "the process has ended")
        return process

    def op_signal(self, message: Message, body: bytes) -> Message:
        """Send a signal to a program's process group."""
        if not self.find(message).signal(int(message["signal"]), group=message.get("group", True)):
            raise Failure("not_found", "the process has ended")
        return {}

    def op_kill(self, message: Message, body: bytes) -> Message:
        """Kill a program's process group, and all that came from the program."""
        self.kill(self.find(message), None)
        return {}

    def op_stdin(self, message: Message, body: bytes) -> Message:
        """Queue bytes for a program's input."""
        process = self.find(message)
        if process.stdin is None or process.close_stdin:
            raise Failure("failed_precondition", "the process has no stdin, or it is closed")
        self.streams.feed(process, body)
        return {}

    def op_close_stdin(self, message: Message, body: bytes) -> Message:
        """Close a program's input after what is queued; in a terminal, send end-of-file."""
        process = self.find(message)
        if process.pty:
            return self.op_stdin(message, b"\x04")
        process.close_stdin = True
        self.streams.write_stdin(process)
        return {}

    def op_resize(self, message: Message, body: bytes) -> Message:
        """Change the size of a program's terminal."""
        process = self.find(message)
        if not process.pty or process.stdin is None:
            raise Failure("failed_precondition", "the process has no terminal")
        processes.resize(process.stdin, message["rows"], message["cols"])
        return {}

    # All of them

    def op_pause(self, message: Message, body: bytes) -> Message:
        """Stop every process of the sandbox; deadlines stand still."""
        if self.paused_at is None:
            self.paused_at = time.monotonic()
        self.signal_all(signal.SIGSTOP)
        return {}

    def op_resume(self, message: Message, body: bytes) -> Message:
        """Let the processes go on."""
        if self.paused_at is not None:
            slept = time.monotonic() - self.paused_at
            for process in self.processes.values():
                if process.deadline is not None and process.pauses:
                    process.deadline += slept
            self.paused_at = None
        self.signal_all(signal.SIGCONT)
        return {}

    def signal_all(self, number: int) -> None:
        """Send a signal to everything in the sandbox but the supervisor."""
        if self.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)  # as process 1: everyone but ourselves, in one step
            return
        for pid in self.guard.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def op_kill_all(self, message: Message, body: bytes) -> Message:
        """Kill every process of the sandbox; its files stay."""
        self.signal_all(signal.SIGKILL)
        self.paused_at = None
        return {}

    def op_usage(self, message: Message, body: bytes) -> Message:
        """Return what the sandbox uses now."""
        pids = self.guard.pids()
        disk = os.statvfs(self.paths.base or "/")
        return {
            "processes": len(pids),
            "memory_bytes": self.guard.memory(pids),
            "cpu_s": self.guard.cpu(pids),
            "disk_used_bytes": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "disk_total_bytes": disk.f_blocks * disk.f_frsize,
        }
