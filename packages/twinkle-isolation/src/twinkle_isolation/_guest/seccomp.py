"""A system call filter for the programs of a sandbox.

It takes away what has a large kernel surface and no use for a program that is to run code:
mounting, other namespaces, keys, kernel modules, bpf, io_uring and the like; and what reaches into
the supervisor, which is the same user: tracing, other processes' memory, descriptors and limits,
and the priority of process 1. It is a second line behind the namespaces and the missing
capabilities, not a list of what is safe.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from functools import lru_cache

from twinkle_isolation._guest import linux

__all__ = ["Filter", "filter_for"]

_RET_ALLOW = 0x7FFF0000
_RET_ERRNO = 0x00050000
_LD_W_ABS = 0x20
_JEQ = 0x15
_JGE = 0x35
_JSET = 0x45
_RET = 0x06
_AT_NR, _AT_ARCH, _AT_ARGS = 0, 4, 16
_CLONE_NEWUSER = 0x10000000
_X32_BIT = 0x40000000

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: x86_64, aarch64 (-1: there is none)
_DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_ABSENT = {  # as on a kernel without them, so that programs take their other way
    "clone3": (435, 435),  # its flags cannot be looked at
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
}
_UNACCOUNTED = {  # memory that no process owns: only a cgroup limits it
    "memfd_create": (319, 279),
    "msgget": (68, 186),
    "semget": (64, 190),
    "shmget": (29, 194),
}
_SOCKET = (41, 198)
# unix, inet, inet6, netlink. Others, such as vsock, are in no network namespace, or need drivers of
# the kernel that no program here has a use for.
_SOCKET_FAMILIES = (1, 2, 10, 16)
_UNSHARE = (272, 97)
_CLONE = (56, 220)
_PRLIMIT = (302, 261)
_SUPERVISOR_PID = 1
# name: x86_64, aarch64, and the argument with a value that is refused
_REFUSED_VALUES = {
    "fcntl F_SETLEASE": (72, 25, 1, 1024),  # whoever opens the file then waits for the holder
    "ioctl TIOCLINUX": (16, 29, 1, 0x541C),
    "ioctl TIOCSTI": (16, 29, 1, 0x5412),
    "ioprio_set IOPRIO_WHO_USER": (251, 30, 0, 3),
    "ioprio_set": (251, 30, 1, _SUPERVISOR_PID),
    "sched_setaffinity": (203, 122, 0, _SUPERVISOR_PID),
    "sched_setattr": (314, 274, 0, _SUPERVISOR_PID),
    "sched_setparam": (142, 118, 0, _SUPERVISOR_PID),
    "sched_setscheduler": (144, 119, 0, _SUPERVISOR_PID),
    "setpriority PRIO_USER": (141, 140, 0, 2),
    "setpriority": (141, 140, 1, _SUPERVISOR_PID),
}


class Filter:
    """A filter, compiled once; `install` puts it on the calling process for ever.

    Args:
        machine: As `os.uname().machine`; for an unknown one there is no filter.
        accounted: A cgroup counts all memory, so memory that no process owns may be made.
    """

    def __init__(self, machine: str, *, accounted: bool) -> None:
        self._program: ctypes.Array[ctypes.c_char] | None = None
        if machine in _ARCH and os.path.exists("/proc/sys/kernel/seccomp"):
            code = _compile(machine, accounted=accounted)
            self._buffer = ctypes.create_string_buffer(code, len(code))
            program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(self._buffer))
            self._program = ctypes.create_string_buffer(program, len(program))

    @property
    def active(self) -> bool:
        """False where this machine has no filters or is of a kind that is not known here."""
        return self._program is not None

    def install(self) -> None:
        """Filter this process and its children; new privileges must be forbidden already."""
        if self._program is None:
            return
        linux.install_filter(ctypes.addressof(self._program))


@lru_cache
def filter_for(machine: str, *, accounted: bool) -> Filter:
    """Return the filter for a sandbox; compiled before the fork, it is shared by all."""
    return Filter(machine, accounted=accounted)


def _compile(machine: str, *, accounted: bool) -> bytes:
    column = list(_ARCH).index(machine)
    code = [
        _step(_LD_W_ABS, 0, 0, _AT_ARCH),
        _step(_JEQ, 1, 0, _ARCH[machine]),
        _refuse(errno.ENOSYS),
        _step(_LD_W_ABS, 0, 0, _AT_NR),
    ]
    if machine == "x86_64":
        code += [_step(_JGE, 0, 1, _X32_BIT), _refuse(errno.ENOSYS)]
    absent = _ABSENT if accounted else _ABSENT | _UNACCOUNTED
    for numbers, error in ((_DENIED, errno.EPERM), (absent, errno.ENOSYS)):
        for number in numbers.values():
            if number[column] >= 0:
                code += [_step(_JEQ, 0, 1, number[column]), _refuse(error)]
    for number in (_UNSHARE[column], _CLONE[column]):
        code += [
            _step(_JEQ, 0, 4, number),
            _step(_LD_W_ABS, 0, 0, _AT_ARGS),
            _step(_JSET, 0, 1, _CLONE_NEWUSER),
            _refuse(errno.EPERM),
            _step(_LD_W_ABS, 0, 0, _AT_NR),
        ]
    code += [
        _step(_JEQ, 0, len(_SOCKET_FAMILIES) + 3, _SOCKET[column]),
        _step(_LD_W_ABS, 0, 0, _AT_ARGS),
        *(
            _step(_JEQ, len(_SOCKET_FAMILIES) - place, 0, family)
            for place, family in enumerate(_SOCKET_FAMILIES)
        ),
        _refuse(errno.EAFNOSUPPORT),
        _step(_LD_W_ABS, 0, 0, _AT_NR),
    ]
    for *numbers, argument, value in _REFUSED_VALUES.values():
        code += [
            _step(_JEQ, 0, 4, numbers[column]),
            _step(_LD_W_ABS, 0, 0, _AT_ARGS + 8 * argument),
            _step(_JEQ, 0, 1, value),
            _refuse(errno.EPERM),
            _step(_LD_W_ABS, 0, 0, _AT_NR),
        ]
    code += [  # own limits only, which are those of process 0
        _step(_JEQ, 0, 3, _PRLIMIT[column]),
        _step(_LD_W_ABS, 0, 0, _AT_ARGS),
        _step(_JEQ, 1, 0, 0),
        _refuse(errno.EPERM),
        _step(_RET, 0, 0, _RET_ALLOW),
    ]
    return b"".join(code)


def _step(operation: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _step(_RET, 0, 0, _RET_ERRNO | error)
