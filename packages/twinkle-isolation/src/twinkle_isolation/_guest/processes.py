"""Start programs inside the sandbox and hold what is known of each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import resource
import select
import signal
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from twinkle_isolation._guest import linux, warm
from twinkle_isolation._guest.files import Failure
from twinkle_isolation._guest.seccomp import Filter

__all__ = ["Launch", "Process", "resize", "start"]

_EXEC_TIMEOUT_S = 5.0
_WAKE_INTERVAL_S = 0.02
_LEAST_MOVED_FD = 64
# When memory ends, the kernel takes programs first, then their supervisor, then the zygote.
_BADNESS = b"1000"
_OWN_BADNESS = b"600"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What every program of the sandbox is started with.

    Attributes:
        root_namespace: The user namespace that programs of `root` enter; `None` without namespaces.
        badness: A descriptor of this process's `oom_score_adj`, and its own value.
    """

    root_namespace: int | None
    syscalls: Filter
    open_files: int
    badness: tuple[int, bytes] | None

    @classmethod
    def prepare(cls, *, root_namespace: int | None, syscalls: Filter, open_files: int) -> Launch:
        """Open what is closed to this process once nobody may look into it."""
        badness = None
        with contextlib.suppress(OSError):
            fd = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            if int(os.pread(fd, 16, 0)) < int(_OWN_BADNESS):
                os.pwrite(fd, _OWN_BADNESS, 0)
            badness = (fd, os.pread(fd, 16, 0))
        return cls(
            root_namespace=root_namespace,
            syscalls=syscalls,
            open_files=open_files,
            badness=badness,
        )

    @contextlib.contextmanager
    def prefer_for_oom_kill(self) -> Generator[None, None, None]:
        """Let the kernel choose what is forked in this block first when memory ends.

        Raising the value takes no privilege. Neither does lowering it again, to what a host with
        CAP_SYS_RESOURCE set for the zygote, else to 0: then the supervisor goes first, with all.
        """
        if self.badness is None:
            yield
            return
        fd, own = self.badness
        with contextlib.suppress(OSError):
            os.pwrite(fd, _BADNESS, 0)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.pwrite(fd, own, 0)


@dataclass
class Process:
    """One started program.

    Attributes:
        duplex: Its `stdin` is also one of its `streams` (a terminal, or a control channel).
        warm: It is a Python function, forked without `execve`.
    """

    id: int
    pid: int
    pty: bool
    streams: dict[str, int]
    stdin: int | None
    deadline: float | None
    output_limit: int | None
    output_bytes: int = 0
    pauses: bool = True  # its deadline stands still while the sandbox is paused
    held: bool = False  # the host asked to stop reading its output
    status: int | None = None  # as from waitpid
    reason: str | None = None  # why the supervisor killed it
    force_end_at: float | None = None
    pending: deque[bytes] = field(default_factory=lambda: deque[bytes]())
    pending_bytes: int = 0
    close_stdin: bool = False
    warm: bool = False

    @property
    def duplex(self) -> bool:
        return self.pty or self.warm

    def signal(self, number: int, *, group: bool = True) -> bool:
        """Send a signal to the process group (or the process); False when it is gone."""
        try:
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def start(
    request: dict[str, Any],
    env: dict[str, str],
    cwd: str,
    *,
    launch: Launch,
    now: float,
) -> Process:
    """Start a program in its own session and process group.

    Waits until it has begun, at most 5 seconds: other programs of the sandbox may stop it before.

    Raises:
        Failure: The directory or the program is not there or may not be used, or no process can be
            made, or it did not begin in time.
    """
    size = request.get("pty")
    function = request.get("function")
    if function:
        child_fds, streams, stdin = _open_control(request.get("outputs", []))
    elif size:
        child_fds, streams, stdin = _open_pty(size)
    else:
        child_fds, streams, stdin = _open_pipes(bool(request.get("stdin")))
    report_read, report_write = os.pipe()

    def become_program() -> NoReturn:
        _exec(request, env, cwd, child_fds, report_write, launch=launch, tty=bool(size))

    try:
        with launch.prefer_for_oom_kill():
            if function:
                pid = warm.fork_on_clean_stack(become_program)
            else:
                pid = os.fork()
                if pid == 0:
                    become_program()
        os.close(report_write)
        report_write = -1
        report = _read_report(report_read, pid)
    except OSError as error:
        _close({*streams.values(), *([] if stdin is None else [stdin])})
        raise Failure("resource_exhausted", f"no new process: {error.strerror}") from error
    finally:
        _close({*child_fds, report_read} | ({report_write} if report_write >= 0 else set()))
    if report:
        _close({*streams.values(), *([] if stdin is None else [stdin])})
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)  # it may be stopped on its way out
            os.waitpid(pid, 0)
        code, _, text = report.decode(errors="replace").partition(":")
        raise Failure(code, text)
    for fd in {*streams.values(), *([] if stdin is None else [stdin])}:
        os.set_blocking(fd, False)
    timeout = request.get("timeout_s")
    return Process(
        id=request["id"],
        pid=pid,
        pty=bool(size),
        streams=streams,
        stdin=stdin,
        deadline=None if timeout is None else now + timeout,
        output_limit=request.get("output_limit"),
        warm=bool(function),
    )


def resize(fd: int, rows: int, columns: int) -> None:
    """Tell a terminal its size in characters."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _open_pipes(with_stdin: bool) -> tuple[tuple[int, ...], dict[str, int], int | None]:
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    if with_stdin:
        in_read, in_write = os.pipe()
    else:
        in_read, in_write = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), None
    return (in_read, out_write, err_write), {"stdout": out_read, "stderr": err_read}, in_write


def _open_control(outputs: list[str]) -> tuple[tuple[int, ...], dict[str, int], int]:
    """Open stdout and stderr, a control channel, and further `outputs` of a function."""
    child, streams, _ = _open_pipes(False)
    ours, theirs = socket.socketpair()
    child = (*child, theirs.detach())
    streams["control"] = ours.detach()
    for name in outputs:
        read, write = os.pipe()
        child = (*child, write)
        streams[name] = read
    return child, streams, streams["control"]


def _open_pty(size: dict[str, int]) -> tuple[tuple[int, ...], dict[str, int], int]:
    master, slave = pty.openpty()
    resize(slave, size["rows"], size["cols"])
    return (slave, slave, slave), {"pty": master}, master


def _exec(
    request: dict[str, Any],
    env: dict[str, str],
    cwd: str,
    fds: tuple[int, ...],
    report: int,
    *,
    launch: Launch,
    tty: bool,
) -> NoReturn:
    """Become the program (in the forked child); tell `report` what prevents it.

    Until `execve` this process is the supervisor's image: it stays closed to others of its user,
    and gives up the supervisor's descriptors first.
    """
    try:
        os.setsid()
        for number in (
            signal.SIGPIPE,
            signal.SIGXFSZ,
            signal.SIGINT,
            signal.SIGCHLD,
            signal.SIGTERM,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        root = launch.root_namespace if request["user"] == "root" else None
        # First out of the way of the numbers they are to have.
        fds = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LEAST_MOVED_FD) for fd in fds)
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, _LEAST_MOVED_FD)
        if root is not None:
            root = fcntl.fcntl(root, fcntl.F_DUPFD_CLOEXEC, _LEAST_MOVED_FD)
        for target, fd in enumerate(fds):
            os.dup2(fd, target, inheritable=target < warm.CONTROL_FD)
        linux.close_descriptors({*range(len(fds)), report, *([] if root is None else [root])})
        if tty:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.umask(0o022)
        try:
            os.chdir(cwd)
        except OSError as error:
            _give_up(report, "invalid_argument", f"cwd {cwd!r}: {error.strerror}")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(launch.open_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        if root is not None:
            linux.setns(root)
            # Else the program starts with none: that is what exec does for everybody but user 0.
            linux.drop_capabilities()
        linux.reset_timer_slack()
        launch.syscalls.install()
        if request.get("function"):
            if root is not None:
                os.close(root)
            os.close(report)
            warm.become(request["function"], env, keep=launch)
        os.execve(_find(request["args"][0], env.get("PATH", "")), request["args"], env)
    except (FileNotFoundError, NotADirectoryError):
        _give_up(report, "not_found", f"no such program: {request['args'][0]!r}")
    except OSError as error:
        code = "resource_exhausted" if error.errno in (11, 12) else "invalid_argument"
        _give_up(report, code, f"cannot start {request['args'][0]!r}: {error}")
    except BaseException as error:
        _give_up(report, "internal", f"{type(error).__name__}: {error}")


def _find(program: str, path: str) -> str:
    """Look a program up in `PATH`; directories that may not be read are passed over."""
    if "/" in program:
        return program
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", program)
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError


def _give_up(report: int, code: str, text: str) -> NoReturn:
    try:
        os.write(report, f"{code}:{text}".encode(errors="replace")[:4000])
    finally:
        os._exit(127)


def _read_report(fd: int, pid: int) -> bytes:
    """Return what the child could not do; nothing once it is the program.

    Whoever stops it on its way (`kill(-1, SIGSTOP)` in a loop) is answered with SIGCONT.
    """
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + _EXEC_TIMEOUT_S
    while time.monotonic() < deadline:
        if not poll.poll(_WAKE_INTERVAL_S * 1000):
            os.kill(pid, signal.SIGCONT)
            continue
        part = os.read(fd, 4096)
        if not part:
            return b"".join(parts)
        parts.append(part)
    text = f"the program did not begin in {_EXEC_TIMEOUT_S:g} s: others of the sandbox stop it"
    return f"resource_exhausted:{text}".encode()


def _close(fds: Any) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
