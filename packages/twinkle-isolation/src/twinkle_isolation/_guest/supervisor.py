"""The one trusted process inside each sandbox: starts programs, moves their output, does file operations.

A single-threaded event loop. It never blocks on what the sandbox's programs do, bounds what it buffers, and ends,
with everything in the sandbox, when the connection to the host closes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from twinkle_isolation._guest import archive, files, linux, orphans, processes
from twinkle_isolation._guest.files import Failure, Paths
from twinkle_isolation._guest.guard import INTERVAL_S, Guard
from twinkle_isolation._guest.processes import Process
from twinkle_isolation._guest.seccomp import Filter
from twinkle_isolation._guest.watch import Watches
from twinkle_isolation._wire import FrameBuffer, FrameError, encode

__all__ = ["Supervisor"]

_CHUNK_BYTES = 64 * 1024
_FILE_CHUNK_BYTES = 256 * 1024
_HIGH_WATER_BYTES = 1 << 20
_MAX_STDIN_BYTES = 8 << 20
_ENTRIES_PER_FRAME = 500
_END_GRACE_S = 0.5
_MAX_PROCESSES = 256  # started through the API and not ended

Message = dict[str, Any]


class Supervisor:
    """Serve one sandbox until the host closes `channel`."""

    def __init__(self, channel: socket.socket, sandbox: Message, *, namespaces: bool) -> None:
        self.channel = channel
        self.sandbox = sandbox
        self.namespaces = namespaces
        self.base: str | None = None if namespaces else sandbox["directory"]
        self.paths = Paths(self.base)
        self.env: dict[str, str] = {str(k): str(v) for k, v in sandbox["env"].items()}
        self.guard = Guard(
            memory_bytes=sandbox["memory_bytes"],
            processes=sandbox["processes"],
            namespaces=namespaces,
        )
        self.syscalls = Filter(os.uname().machine, accounted=sandbox["accounted"])
        self.processes: dict[int, Process] = {}
        self.by_pid: dict[int, Process] = {}
        self.reads: dict[int, tuple[int, int]] = {}  # id -> fd, bytes still allowed
        self.held_reads: set[int] = set()
        self.writes: dict[int, int] = {}
        self.frames = FrameBuffer()
        self.out: deque[memoryview] = deque()
        self.out_bytes = 0
        self.throttled = False
        self.guard_at: float | None = None
        self.paused_at: float | None = None

    # Setting up

    def set_up(self, archive_fd: int | None) -> None:
        """Make the last preparations before the first request: limits, privileges, restored files."""
        if self.base is not None:
            for name in ("home/user", "root", "tmp"):
                os.makedirs(f"{self.base}/{name}", exist_ok=True)
        self.limit_resources()
        linux.forbid_new_privileges()
        if self.namespaces:
            linux.drop_capabilities(keep=(linux.CAP_SYS_RESOURCE,))
        else:
            linux.drop_capabilities()
        linux.set_dumpable(False)
        if archive_fd is not None:
            archive.restore(archive_fd, self.base or "/")
        os.chdir(self.base or "/")
        self.channel.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.channel, selectors.EVENT_READ, self.on_channel)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.wake_fd = wake_read
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, self.on_wake)
        self.watches = Watches(self.send)

    def limit_resources(self) -> None:
        """Set the limits that every process of the sandbox inherits."""
        wanted = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_DATA: self.sandbox["memory_bytes"],
            resource.RLIMIT_NOFILE: self.sandbox["open_files"],
            resource.RLIMIT_MEMLOCK: 64 * 1024,
            resource.RLIMIT_MSGQUEUE: 800 * 1024,
            resource.RLIMIT_SIGPENDING: 1024,
        }
        if self.sandbox["file_bytes"] is not None:
            wanted[resource.RLIMIT_FSIZE] = self.sandbox["file_bytes"]
        if self.namespaces:
            # Counted per user namespace, so this is the sandbox's own count; one is the supervisor.
            wanted[resource.RLIMIT_NPROC] = self.sandbox["processes"] + 1
        for kind, value in wanted.items():
            _, hard = resource.getrlimit(kind)
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))

    # The loop

    def run(self) -> None:
        """Serve until the host hangs up."""
        try:
            while True:
                for key, _ in self.selector.select(self.next_delay()):
                    key.data()
                self.pump_reads()
                self.on_time()
                self.flush()
        except (FrameError, ConnectionError, EOFError):
            pass
        finally:
            if not self.namespaces:
                orphans.kill_descendants(os.getpid())
            os._exit(0)

    def next_delay(self) -> float | None:
        """Return how long the loop may sleep."""
        if not self.throttled and len(self.reads) > len(self.held_reads):
            return 0
        times = [] if self.guard_at is None else [self.guard_at]
        if self.paused_at is None:
            times += [p.deadline for p in self.processes.values() if p.deadline is not None]
        times += [p.force_end_at for p in self.processes.values() if p.force_end_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def on_wake(self) -> None:
        """Reap the children that ended, adopted ones too."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_fd, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                process = self.by_pid.pop(pid, None)
                if process is not None:
                    process.status = status
                    self.drop_stdin(process)
                    if process.reason is not None:
                        # What left the killed group may hold the output open for ever.
                        process.force_end_at = time.monotonic() + _END_GRACE_S
                    self.end_if_done(process)

    def on_time(self) -> None:
        """Do what is due now: deadlines, the guard, ends that are forced."""
        if self.guard_at is None and not self.processes:
            return
        now = time.monotonic()
        if self.paused_at is None:
            for process in list(self.processes.values()):
                if process.deadline is not None and process.deadline <= now:
                    process.deadline = None
                    self.kill(process, "timeout")
        for process in list(self.processes.values()):
            if process.force_end_at is not None and process.force_end_at <= now:
                self.end(process)
        if self.guard_at is not None and self.guard_at <= now:
            busy, killed = self.guard.check()
            for pid, reason in killed.items():
                process = self.by_pid.get(pid)
                if process is None and len(self.processes) == 1:
                    process = next(iter(self.processes.values()))
                if process is not None and process.reason is None:
                    process.reason = reason
            self.guard_at = now + INTERVAL_S if busy or self.processes else None

    # To the host

    def send(self, message: Message, body: bytes = b"") -> None:
        """Queue one frame; `throttled` says when the host is behind."""
        frame = encode(message, body)
        self.out.append(memoryview(frame))
        self.out_bytes += len(frame)
        if self.out_bytes > _HIGH_WATER_BYTES and not self.throttled:
            self.throttled = True
            for process in self.processes.values():
                self.watch_output(process)

    def flush(self) -> None:
        """Send what the connection takes now."""
        while self.out:
            try:
                sent = self.channel.send(self.out[0])
            except BlockingIOError:
                break
            self.out_bytes -= sent
            if sent == len(self.out[0]):
                self.out.popleft()
            else:
                self.out[0] = self.out[0][sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        if self.selector.get_key(self.channel).events != events:
            self.selector.modify(self.channel, events, self.on_channel)
        if self.throttled and self.out_bytes < _HIGH_WATER_BYTES // 4:
            self.throttled = False
            for process in self.processes.values():
                self.watch_output(process)

    def on_channel(self) -> None:
        """Read requests and answer them."""
        try:
            data = self.channel.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        for message, body in self.frames.feed(data):
            self.dispatch(message, body)

    def dispatch(self, message: Message, body: bytes) -> None:
        handler: Callable[[Message, bytes], Message | None] | None = getattr(
            self, f"op_{message.get('op')}", None
        )
        try:
            if handler is None:
                raise Failure("unimplemented", f"unknown operation {message.get('op')!r}")
            result = handler(message, body)
        except Exception as error:
            failure = files.failure_of(error)
            self.send(
                {
                    "id": message.get("id"),
                    "ev": "error",
                    "code": failure.code,
                    "message": str(failure),
                }
            )
        else:
            if result is not None:
                self.send({"id": message["id"], "ev": "result", "value": result})

    # Processes

    def op_exec(self, message: Message, body: bytes) -> None:
        """Start a program; its output and end follow as events under the request's id."""
        if len(self.processes) >= _MAX_PROCESSES:
            raise Failure("resource_exhausted", f"{_MAX_PROCESSES} programs are running already")
        user = message.setdefault("user", "user")
        home = self.paths.home(user)
        cwd = self.paths.resolve(message.get("cwd") or home, user)
        env = self.env | {"HOME": home, "USER": user, "LOGNAME": user}
        if self.base is not None:
            env.setdefault("TMPDIR", f"{self.base}/tmp")
        if message.get("pty"):
            env.setdefault("TERM", "xterm-256color")
        env |= {str(k): str(v) for k, v in message.get("env", {}).items()}
        now = time.monotonic()
        process = processes.start(
            message, env, cwd, namespaces=self.namespaces, syscalls=self.syscalls, now=now
        )
        self.processes[process.id] = process
        self.by_pid[process.pid] = process
        self.send({"id": process.id, "ev": "start", "pid": process.pid})
        self.watch_output(process)
        if self.guard_at is None:
            self.guard_at = now + INTERVAL_S

    def watch_output(self, process: Process) -> None:
        """Read the program's output, or stop reading it while somebody is behind."""
        wanted = not (self.throttled or process.held)
        for name, fd in process.streams.items():
            if wanted and fd not in self.selector.get_map():
                self.selector.register(
                    fd,
                    selectors.EVENT_READ,
                    lambda p=process, n=name, f=fd: self.on_output(p, n, f),
                )
            elif not wanted and fd in self.selector.get_map():
                self.selector.unregister(fd)

    def on_output(self, process: Process, name: str, fd: int) -> None:
        """Move one piece of output to the host."""
        if process.pty and process.pending:
            self.write_stdin(process)
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a terminal whose last user is gone gives EIO
        if data:
            process.output_bytes += len(data)
            limit = process.output_limit
            if limit is not None and process.output_bytes > limit:
                data = data[: max(0, len(data) - (process.output_bytes - limit))]
                process.output_bytes = limit
                if process.reason is None:
                    self.kill(process, "output")
            if data:
                self.send({"id": process.id, "ev": "data", "stream": name}, data)
            return
        self.close_stream(process, name)
        self.end_if_done(process)

    def close_stream(self, process: Process, name: str) -> None:
        fd = process.streams.pop(name)
        if fd in self.selector.get_map():
            self.selector.unregister(fd)
        if fd == process.stdin:
            process.stdin = None
        os.close(fd)

    def end_if_done(self, process: Process) -> None:
        """The end is told when the program has ended and its output is read to the last byte."""
        if process.status is not None and not process.streams:
            self.end(process)

    def end(self, process: Process) -> None:
        for name in list(process.streams):
            self.close_stream(process, name)
        self.drop_stdin(process)
        self.processes.pop(process.id, None)
        self.by_pid.pop(process.pid, None)
        status = process.status
        code = None if status is None else os.waitstatus_to_exitcode(status)
        self.send(
            {
                "id": process.id,
                "ev": "end",
                "exit_code": code if code is not None and code >= 0 else -1,
                "signal": -code if code is not None and code < 0 else None,
                "reason": process.reason,
            }
        )

    def kill(self, process: Process, reason: str) -> None:
        """Kill the program's group because of a limit."""
        process.reason = reason
        process.signal(signal.SIGKILL)
        if self.namespaces is False:
            for pid in orphans.descendants(process.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        process.force_end_at = time.monotonic() + _END_GRACE_S

    def find(self, message: Message) -> Process:
        process = self.processes.get(message["process"])
        if process is None:
            raise Failure("not_found", "the process has ended")
        return process

    def op_signal(self, message: Message, body: bytes) -> Message:
        """Send a signal to a program's process group."""
        if not self.find(message).signal(int(message["signal"]), group=message.get("group", True)):
            raise Failure("not_found", "the process has ended")
        return {}

    def op_stdin(self, message: Message, body: bytes) -> Message:
        """Queue bytes for a program's input."""
        process = self.find(message)
        if process.stdin is None or process.close_stdin:
            raise Failure(
                "failed_precondition", "the process was started without stdin, or it is closed"
            )
        if process.pending_bytes + len(body) > _MAX_STDIN_BYTES:
            raise Failure(
                "resource_exhausted",
                f"the program has not read its input: {process.pending_bytes} bytes are waiting",
            )
        process.pending.append(body)
        process.pending_bytes += len(body)
        self.write_stdin(process)
        return {}

    def op_close_stdin(self, message: Message, body: bytes) -> Message:
        """Close a program's input after what is queued; in a terminal, send end-of-file."""
        process = self.find(message)
        if process.pty:
            return self.op_stdin(message, b"\x04")
        process.close_stdin = True
        self.write_stdin(process)
        return {}

    def write_stdin(self, process: Process) -> None:
        """Give the program what its pipe takes now."""
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
        if process.pty:
            if fd in self.selector.get_map():
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.pending else 0)
                self.selector.modify(fd, events, self.selector.get_key(fd).data)
        elif process.pending:
            if fd not in self.selector.get_map():
                self.selector.register(
                    fd, selectors.EVENT_WRITE, lambda p=process: self.write_stdin(p)
                )
        else:
            if fd in self.selector.get_map():
                self.selector.unregister(fd)
            if process.close_stdin:
                self.drop_stdin(process)

    def drop_stdin(self, process: Process) -> None:
        fd = process.stdin
        if fd is None or process.pty:
            return
        if fd in self.selector.get_map():
            self.selector.unregister(fd)
        os.close(fd)
        process.stdin = None
        process.pending.clear()

    def op_resize(self, message: Message, body: bytes) -> Message:
        """Change the size of a program's terminal."""
        process = self.find(message)
        if not process.pty or process.stdin is None:
            raise Failure("failed_precondition", "the process has no terminal")
        processes.resize(process.stdin, message["rows"], message["cols"])
        return {}

    def op_flow(self, message: Message, body: bytes) -> None:
        """Stop or go on sending the data of one request."""
        number, stop = message["target"], bool(message["stop"])
        process = self.processes.get(number)
        if process is not None:
            process.held = stop
            self.watch_output(process)
        elif stop and number in self.reads:
            self.held_reads.add(number)
        else:
            self.held_reads.discard(number)

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
                if process.deadline is not None:
                    process.deadline += slept
            self.paused_at = None
        self.signal_all(signal.SIGCONT)
        return {}

    def signal_all(self, number: int) -> None:
        if self.namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)  # as process 1: everyone but ourselves, in one step
            return
        for pid in self.guard.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def op_usage(self, message: Message, body: bytes) -> Message:
        """Return what the sandbox uses now."""
        pids = self.guard.pids()
        disk = os.statvfs(self.base or "/")
        return {
            "processes": len(pids),
            "memory_bytes": self.guard.memory(pids),
            "disk_used_bytes": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "disk_total_bytes": disk.f_blocks * disk.f_frsize,
        }

    # Files

    def where(self, message: Message, key: str = "path") -> str:
        return self.paths.resolve(str(message[key]), str(message.get("user", "user")))

    def op_stat(self, message: Message, body: bytes) -> Message:
        """Describe a path."""
        return files.stat_path(self.where(message))

    def op_list(self, message: Message, body: bytes) -> Message:
        """List a directory; entries come in parts."""
        part: list[Message] = []
        for entry in files.list_dir(self.where(message), int(message.get("depth", 1))):
            part.append(entry)
            if len(part) == _ENTRIES_PER_FRAME:
                self.send({"id": message["id"], "ev": "part", "entries": part})
                part = []
        return {"entries": part}

    def op_mkdir(self, message: Message, body: bytes) -> Message:
        """Make a directory."""
        return files.make_dir(self.where(message))

    def op_move(self, message: Message, body: bytes) -> Message:
        """Rename a path."""
        return files.move(self.where(message), self.where(message, "destination"))

    def op_remove(self, message: Message, body: bytes) -> Message:
        """Remove a path with all that is below it."""
        files.remove(self.where(message))
        return {}

    def op_read(self, message: Message, body: bytes) -> None:
        """Send a file's content as data events, then the result."""
        fd, size = files.open_read(self.where(message))
        number = message["id"]
        self.reads[number] = (fd, int(message["limit"]))
        self.send({"id": number, "ev": "start", "size": size})

    def op_cancel(self, message: Message, body: bytes) -> None:
        """Stop sending a file."""
        entry = self.reads.pop(message["target"], None)
        self.held_reads.discard(message["target"])
        if entry is not None:
            os.close(entry[0])

    def pump_reads(self) -> None:
        """Send one more piece of each file that is being read."""
        for number in list(self.reads):
            if self.throttled:
                return
            if number in self.held_reads:
                continue
            fd, left = self.reads[number]
            try:
                data = os.read(fd, min(_FILE_CHUNK_BYTES, left + 1))
                if len(data) > left:
                    raise Failure(
                        "resource_exhausted", "the file is longer than the limit of the request"
                    )
            except (OSError, Failure) as error:
                failure = files.failure_of(error)
                self.send(
                    {"id": number, "ev": "error", "code": failure.code, "message": str(failure)}
                )
                data = None
            if data:
                self.reads[number] = (fd, left - len(data))
                self.send({"id": number, "ev": "data"}, data)
                continue
            if data is not None:
                self.send({"id": number, "ev": "result", "value": {}})
            del self.reads[number]
            os.close(fd)

    def op_write(self, message: Message, body: bytes) -> Message | None:
        """Write a file; with `more`, the rest comes in `chunk` messages."""
        path = self.where(message)
        fd = files.open_write(path, message.get("mode"), append=bool(message.get("append")))
        self.writes[message["id"]] = fd
        return self.op_chunk(message | {"shown": path}, body)

    def op_chunk(self, message: Message, body: bytes) -> Message | None:
        """Write one more piece of a file."""
        fd = self.writes.get(message["id"])
        if fd is None:
            return None  # failed before; the error was sent
        try:
            view = memoryview(body)
            while view:
                view = view[os.write(fd, view) :]
        except OSError:
            os.close(self.writes.pop(message["id"]))
            raise
        if message.get("more"):
            return None
        os.close(self.writes.pop(message["id"]))
        return {}

    def op_watch(self, message: Message, body: bytes) -> None:
        """Begin to send what changes below a directory."""
        if self.watches.fd is None:
            self.selector.register(
                self.watches.open(), selectors.EVENT_READ, self.watches.on_readable
            )
        self.watches.add(
            message["id"], self.where(message), recursive=bool(message.get("recursive"))
        )
        self.send({"id": message["id"], "ev": "start"})

    def op_unwatch(self, message: Message, body: bytes) -> Message:
        """Stop watching."""
        self.watches.remove(message["target"])
        self.send({"id": message["target"], "ev": "end"})
        return {}

    def op_dump(self, message: Message, body: bytes) -> None:
        """Send every writable file of the sandbox as one tar stream, then the result. Pause first."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reader)
                archive.dump(writer, self.base or "/")
            except BaseException:
                os._exit(1)
            os._exit(0)
        os.close(writer)
        os.set_blocking(reader, False)
        process = Process(
            id=message["id"],
            pid=pid,
            pty=False,
            streams={"archive": reader},
            stdin=None,
            deadline=time.monotonic() + float(message["timeout_s"]),
            output_limit=None,
        )
        self.processes[process.id] = process
        self.by_pid[pid] = process
        self.watch_output(process)
