"""Programs that are Python functions, forked from the warm supervisor without an `execve`.

The zygote imports once what they need; a program then costs a fork. What makes it a program of the
sandbox and no copy of the supervisor is done in `processes` (descriptors, limits, namespaces,
system call filter), as for one that is executed.
"""

from __future__ import annotations

import _thread
import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, cast

from twinkle_isolation._guest import linux

__all__ = ["CONTROL_FD", "become", "fork_on_clean_stack", "prepare"]

CONTROL_FD = 3
"""The program's end of its control channel, a stream socket; further outputs follow it."""

_prepared: list[str] = []  # the module search path of programs
_kept: list[object] = []


def prepare(paths: Sequence[str], preload: Sequence[str]) -> None:
    """Import what programs share (in the zygote).

    Args:
        paths: Directories put on the module search path of programs.
        preload: Modules to import now.

    Raises:
        ImportError: One of them cannot be imported; the message names it.
    """
    own = list(sys.path)
    # A pool of threads would not survive the fork.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    site = importlib.import_module("site")  # not imported yet: the zygote runs with -S
    site.main()
    _prepared[:] = ["", *paths, *(path for path in sys.path if not path.endswith("/twinkle/lib"))]
    sys.path[:] = [*own, *_prepared[1:]]
    try:
        for name in [*preload, *(["numpy.random"] if "numpy" in preload else [])]:
            try:
                importlib.import_module(name)
            except Exception as error:
                raise ImportError(
                    f"cannot preload {name!r}: {type(error).__name__}: {error}"
                ) from error
    finally:
        sys.path[:] = own


def fork_on_clean_stack(child: Callable[[], NoReturn]) -> int:
    """Fork; the child runs `child` as the main thread, with no frame of this one below it.

    Raises:
        OSError: There is no process or thread to be had.
    """
    outcome: list[int | OSError] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            pid = os.fork()
            if pid == 0:
                child()
            outcome.append(pid)
        except OSError as error:
            outcome.append(error)
        finally:
            done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError as error:
        raise BlockingIOError(11, str(error)) from error
    done.acquire()
    result = outcome[0]
    if isinstance(result, OSError):
        raise result
    return result


def become(function: str, env: Mapping[str, str], *, keep: object) -> NoReturn:
    """Run a function as the program of this process; its return is exit code 0.

    Args:
        function: `module:name`.
        env: The program's whole environment.
        keep: What the supervisor holds. It must not be finalized here, for the numbers of its
            closed descriptors belong to the program's files now.
    """
    _kept.append(keep)
    os.environ.clear()
    os.environ.update(env)
    if not _prepared:
        prepare([path for path in env.get("PYTHONPATH", "").split(":") if path], [])
    module_name, _, name = function.partition(":")
    run = cast("Callable[[], None]", getattr(importlib.import_module(module_name), name))
    sys.path[:] = _prepared
    sys.argv[:] = [""]
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as in every Python program
    _open_streams()
    _reseed()
    gc.collect()
    gc.freeze()
    linux.set_dumpable(True)  # as after an execve; before it, this was the supervisor's image
    code = 1
    try:
        run()
        code = 0
    finally:
        os._exit(code)  # the way back leads into the supervisor's code


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(  # noqa: SIM115  # the program's, to its end
        0, encoding="utf-8", errors="surrogateescape", closefd=False
    )
    # By the line, though they are pipes: what was printed before a crash is not lost, and stands
    # before what subprocesses print.
    sys.stdout = sys.__stdout__ = _text(1, "surrogateescape")
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace")


def _text(fd: int, errors: str) -> object:
    return open(fd, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)


def _reseed() -> None:
    # `random` reseeds itself after a fork; where it was imported before, the C generator too.
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["_name_sequence"] = None
