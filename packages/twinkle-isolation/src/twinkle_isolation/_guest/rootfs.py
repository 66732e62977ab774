"""Give a process its own namespaces, user and root directory.

The jail around the zygote (see `twinkle_isolation.jail`) holds read-only copies of what a sandbox
may see of the host. Each sandbox gets a fresh tmpfs of limited size as its root, binds those
directories into it, and pivots.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

from twinkle_isolation._guest import linux
from twinkle_isolation._guest.layout import DEVICES, ROOT_POINT, JailLayout

__all__ = [
    "become_user",
    "enter_namespaces",
    "enter_root",
    "make_root_user",
]

_GUEST_UID = 1000
_GUEST_GID = 1000

_DIRECTORIES = (
    ("etc", 0o755),
    ("etc/ssl", 0o755),
    ("home", 0o755),
    ("home/user", 0o755),
    ("root", 0o755),
    ("tmp", 0o1777),
    ("run", 0o755),
    ("var", 0o755),
    ("var/tmp", 0o1777),
    ("var/log", 0o755),
    ("opt", 0o755),
    ("opt/bin", 0o755),
    ("srv", 0o755),
    ("mnt", 0o755),
)
# The host has one number for all of these, so one sandbox may not take all.
_MAX_TERMINALS = 64
_MAX_INOTIFY_INSTANCES = 16
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs", "scsi", "acpi")


def become_user(uid: int, gid: int) -> None:
    """Give up root for `uid` (nothing to do when the process is that user already)."""
    if os.geteuid() == uid:
        return
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    linux.set_dumpable(True)  # else /proc/self/uid_map belongs to root


def enter_namespaces(*, network: bool) -> None:
    """Leave for new user, mount, pid, ipc, uts, cgroup and (unless `network`) network namespaces.

    The next fork makes process 1 of the pid namespace.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = (
        linux.CLONE_NEWUSER
        | linux.CLONE_NEWNS
        | linux.CLONE_NEWPID
        | linux.CLONE_NEWIPC
        | linux.CLONE_NEWUTS
        | linux.CLONE_NEWCGROUP
    )
    linux.unshare(flags if network else flags | linux.CLONE_NEWNET)
    _map_user(_GUEST_UID, uid, _GUEST_GID, gid)


def make_root_user(processes: int) -> int:
    """Leave for a user namespace in which the sandbox's user is root; return its descriptor.

    Programs of `root` enter it. It is made before there is any program, by a process that is none
    of the sandbox's: who runs as the same user owns it, and could look into whoever is on its way
    in. After it the sandbox may make no other.

    Args:
        processes: How many the sandbox may have. The kernel notes it with the new namespace.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = processes if hard == resource.RLIM_INFINITY else min(processes, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    linux.unshare(linux.CLONE_NEWUSER)
    _map_user(0, _GUEST_UID, 0, _GUEST_GID)
    return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _map_user(inner_uid: int, outer_uid: int, inner_gid: int, outer_gid: int) -> None:
    """Write the one-line uid and gid maps of a user namespace this process just made."""
    _write("/proc/self/setgroups", b"deny")
    _write("/proc/self/uid_map", f"{inner_uid} {outer_uid} 1".encode())
    _write("/proc/self/gid_map", f"{inner_gid} {outer_gid} 1".encode())


def enter_root(layout: JailLayout, sandbox: dict[str, Any]) -> None:
    """Build the sandbox's root and make it `/`; for process 1 of the new namespaces."""
    size = int(sandbox["disk_bytes"])
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount(
        "tmpfs",
        ROOT_POINT,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"mode=0755,size={size},nr_inodes={max(4096, size // 8192)}",
    )
    _fill_root(layout, sandbox)
    for path, target in layout.links.items():
        os.symlink(target, ROOT_POINT + path)
    for path in layout.binds:
        target = ROOT_POINT + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _write(target, b"", create=True)
        linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
    _mount_system(sandbox)
    linux.pivot_root_here(ROOT_POINT)
    linux.sethostname(str(sandbox["hostname"]))
    if not sandbox["network"]:
        linux.bring_up_loopback()


def _fill_root(layout: JailLayout, sandbox: dict[str, Any]) -> None:
    root = ROOT_POINT
    for name, mode in _DIRECTORIES:
        os.mkdir(f"{root}/{name}", mode)
        if mode & 0o1000:
            os.chmod(f"{root}/{name}", mode)
    for name, content in layout.etc.items():
        _write(f"{root}/etc/{name}", content, create=True)
    hostname = str(sandbox["hostname"])
    _write(f"{root}/etc/hostname", f"{hostname}\n".encode(), create=True)
    hosts = f"127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost\n"
    _write(f"{root}/etc/hosts", hosts.encode(), create=True)


def _mount_system(sandbox: dict[str, Any]) -> None:
    quiet = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    dev = f"{ROOT_POINT}/dev"
    os.mkdir(dev)
    linux.mount(DEVICES, dev, None, linux.MS_BIND | linux.MS_REC)
    linux.mount(
        "tmpfs",
        f"{dev}/shm",
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"mode=1777,size={int(sandbox['shm_bytes'])}",
    )
    linux.mount(
        "devpts",
        f"{dev}/pts",
        "devpts",
        linux.MS_NOSUID | linux.MS_NOEXEC,
        f"newinstance,ptmxmode=0666,mode=620,max={_MAX_TERMINALS}",
    )
    proc = f"{ROOT_POINT}/proc"
    os.mkdir(proc)
    linux.mount("proc", proc, "proc", quiet)
    # Nobody in this sandbox makes another user namespace (and gains capabilities over it).
    _write(f"{proc}/sys/user/max_user_namespaces", b"0")
    with contextlib.suppress(FileNotFoundError):  # a kernel without inotify
        _write(f"{proc}/sys/user/max_inotify_instances", b"%d" % _MAX_INOTIFY_INSTANCES)
    # Where the sandbox's user is the host's root, the kernel's switches would be its to turn.
    for name in _PROC_READ_ONLY:
        path = f"{proc}/{name}"
        if os.path.exists(path):
            linux.mount(path, path, None, linux.MS_BIND | linux.MS_REC)
            remount = linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY
            linux.mount(None, path, None, remount | quiet)


def _write(path: str, content: bytes, *, create: bool = False) -> None:
    flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
    fd = os.open(path, flags, 0o644)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
