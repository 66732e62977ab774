"""The Linux calls that Python 3.11 has no function for."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from types import FrameType

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "bring_up_loopback",
    "close_descriptors",
    "drop_capabilities",
    "filesystem_type",
    "forbid_new_privileges",
    "ignore_signal",
    "install_filter",
    "mount",
    "pivot_root_here",
    "reset_timer_slack",
    "set_child_subreaper",
    "set_dumpable",
    "set_parent_death_signal",
    "sethostname",
    "setns",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_MNT_DETACH = 2
_SECCOMP_MODE_FILTER = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_STATFS_BYTES = 256  # more than `struct statfs` has anywhere; it begins with the type, a long
_PR_SET_TIMERSLACK = 29
_DEFAULT_SLACK_NS = 50_000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def ignore_signal(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike `SIG_IGN`, the wake-up descriptor is still written and children wait."""


def unshare(flags: int) -> None:
    """Move this process into new namespaces (`CLONE_NEW*`)."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def close_descriptors(keep: set[int]) -> None:
    """Close every descriptor of this process but those in `keep`."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def filesystem_type(fd: int) -> int:
    """Return the magic number of the file system that an open file is on."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    _check(_libc.fstatfs(fd, buffer), "fstatfs")
    return ctypes.c_ulong.from_buffer(buffer).value


def reset_timer_slack() -> None:
    """Let timers of this process be as exact as those of any other."""
    _check(_prctl(_PR_SET_TIMERSLACK, _DEFAULT_SLACK_NS), "prctl(TIMERSLACK)")


def setns(namespace: int) -> None:
    """Move this process into the namespace that the descriptor stands for."""
    _check(_libc.setns(namespace, 0), "setns")


def mount(
    source: str | None,
    target: str,
    kind: str | None = None,
    flags: int = 0,
    data: str | None = None,
) -> None:
    """Attach a file system; the arguments are those of the system call of that name."""
    _check(
        _libc.mount(
            source.encode() if source is not None else None,
            target.encode(),
            kind.encode() if kind is not None else None,
            flags,
            data.encode() if data is not None else None,
        ),
        f"mount {source or kind} on {target}",
    )


def pivot_root_here(root: str) -> None:
    """Make `root` (a mount point) this mount namespace's root and detach the old one."""
    os.chdir(root)
    number = _SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"pivot_root: no system call number known for {os.uname().machine!r}")
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "detach the old root")
    os.chdir("/")


def sethostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    raw = name.encode()
    _check(_libc.sethostname(raw, len(raw)), "sethostname")


def bring_up_loopback() -> None:
    """Set the interface `lo` of this network namespace up."""
    siocgifflags, siocsifflags, iff_up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh22x", b"lo", 0)
        flags = struct.unpack("16sh22x", fcntl.ioctl(sock, siocgifflags, request))[1]
        fcntl.ioctl(sock, siocsifflags, struct.pack("16sh22x", b"lo", flags | iff_up))


def _prctl(option: int, value: int = 0) -> int:
    return _libc.prctl(option, value, 0, 0, 0)


def set_parent_death_signal(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal_number), "prctl(PDEATHSIG)")


def set_child_subreaper() -> None:
    """Become the parent of every orphan among this process's descendants."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "prctl(CHILD_SUBREAPER)")


def set_dumpable(dumpable: bool) -> None:
    """Say whether processes of the same user may look into this one (`/proc/PID`, ptrace)."""
    _check(_prctl(_PR_SET_DUMPABLE, int(dumpable)), "prctl(DUMPABLE)")


def forbid_new_privileges() -> None:
    """Take the effect from set-uid programs, for this process and its children."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(NO_NEW_PRIVS)")


def install_filter(program: int) -> None:
    """Put a system call filter (the address of a `struct sock_fprog`) on this process for ever."""
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)
    _check(result, "prctl(SECCOMP)")


def drop_capabilities() -> None:
    """Drop every capability, and the whole bounding set."""
    for capability in range(64):
        # The kernel knows fewer than 64; EINVAL past its last one.
        if _prctl(_PR_CAPBSET_DROP, capability) < 0 and capability > 40:
            break
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    data = bytes(24)
    with contextlib.suppress(AttributeError):
        _check(_libc.capset(header, data), "capset")
