"""A sandbox this process holds: its time on the server, and its certain end.

Every lease is in one process-wide list until its sandbox has been killed. What is left there is
killed when the interpreter exits; an `os.fork` child starts with an empty list, for the sandboxes
are its parent's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from typing import Any

from e2b import Sandbox

from twinkle_agentic.envs.agentenv.failures import Fault, read_failure
from twinkle_agentic.envs.agentenv.types import SandboxSpec
from twinkle_agentic.envs.agentenv.waiting import (
    check_process,
    exiting,
    in_flight,
    wait_for_calls,
    wait_for_creations,
)

logger = logging.getLogger(__name__)

__all__ = ["Lease", "kill_all", "live_leases"]

_MARGIN_S = 30.0  # a lease outlasts the command that runs in it by this much
_RENEW_AFTER = 0.05  # of the lease: what has been used of it before a step renews it
_EXIT_S = 15.0  # the interpreter's exit waits this long for the kills
_EXIT_CALLS_S = 5.0  # and this long for calls that end because their sandboxes did
_EXIT_REQUEST_S = 5.0
_EXIT_THREADS = 16

_lock = threading.Lock()
_live: dict[str, Lease] = {}


class Lease:
    """One sandbox and the time it has.

    Args:
        sandbox: The SDK's handle.
        spec: What it was made from.
        taken_at: `time.monotonic()` before the request that set its time.
        setup_output: What the setup commands printed.

    Attributes:
        fresh: No request to the sandbox itself has succeeded yet.
    """

    def __init__(
        self, sandbox: Sandbox, spec: SandboxSpec, *, taken_at: float, setup_output: str = ""
    ) -> None:
        self.sandbox = sandbox
        self.spec = spec
        self.setup_output = setup_output
        self.fresh = True
        self._timeout_s = spec.sandbox_timeout_s
        self._ends_at = taken_at + spec.sandbox_timeout_s
        self._kill_lock = threading.Lock()
        self._pid = os.getpid()
        self._killed = False
        _enlist(self)

    @property
    def sandbox_id(self) -> str:
        """The sandbox's id."""
        return self.sandbox.sandbox_id

    @property
    def killed(self) -> bool:
        """Whether it has been killed from here."""
        return self._killed

    def cover(self, seconds: float) -> str | None:
        """Make the lease outlast something that takes `seconds`.

        Returns:
            Why that failed; `None` where it holds.
        """
        needed = seconds + _MARGIN_S
        if self._ends_at - time.monotonic() >= needed:
            return None
        # With a margin more than needed, the next command of the same length asks for nothing.
        return self._extend(max(needed + _MARGIN_S, self._timeout_s))

    def renew(self) -> str | None:
        """Start the idle time anew, unless hardly any of it has been used.

        Returns:
            Why that failed; `None` where it did not.
        """
        left = self._ends_at - time.monotonic()
        if left >= self._timeout_s * (1 - _RENEW_AFTER):
            return None
        return self._extend(self._timeout_s)

    def resume(self) -> None:
        """Wake a paused sandbox.

        Raises:
            Exception: What the SDK raises.
        """
        self._connect(self._timeout_s)

    def kill(self, *, request_timeout: float | None = None) -> bool:
        """End the sandbox; calling it again does nothing.

        Args:
            request_timeout: Seconds for one try only, with no other; by default as the connection
                has it.

        Returns:
            Whether it is certainly gone. If not, the exit of the interpreter tries once more, and
            then its timeout and `sweep` are left.
        """
        if self._pid != os.getpid():
            return False
        options: dict[str, Any] = {}
        if request_timeout is not None:
            options = {"request_timeout": request_timeout, "retries": 0}
        with in_flight(), self._kill_lock:
            if self._killed:
                return True
            try:
                self.sandbox.kill(**options)
            except Exception as error:
                failure = read_failure(error)
                if failure.fault is not Fault.NOT_FOUND:
                    logger.warning(
                        "sandbox %s could not be killed (%s): it is left to its timeout of %g s, "
                        "the exit of this process and a sweep",
                        self.sandbox_id,
                        failure.words,
                        self._timeout_s,
                    )
                    return False
            self._killed = True
        with _lock:
            _live.pop(self.sandbox_id, None)
        return True

    def forget(self) -> None:
        """Take note that the server says the sandbox is gone."""
        self._killed = True
        with _lock:
            _live.pop(self.sandbox_id, None)

    def _extend(self, seconds: float) -> str | None:
        try:
            self._connect(seconds)
        except Exception as error:
            return read_failure(error).words
        return None

    def _connect(self, seconds: float) -> None:
        # `connect` never shortens what the sandbox has, `set_timeout` would.
        check_process()
        asked_at = time.monotonic()
        with in_flight():
            self.sandbox.connect(timeout=math.ceil(seconds))
        self._ends_at = max(self._ends_at, asked_at + math.ceil(seconds))


def live_leases() -> list[Lease]:
    """Return the leases of this process whose sandboxes have not been killed."""
    with _lock:
        return list(_live.values())


def kill_all(*, timeout_s: float = _EXIT_S) -> list[str]:
    """Kill every sandbox this process still holds, several at once.

    Args:
        timeout_s: Seconds to wait for the answers.

    Returns:
        The ids that could not be confirmed gone.
    """
    leases = [lease for lease in live_leases() if not lease.killed]
    left = deque(leases)
    deadline = time.monotonic() + timeout_s

    def work() -> None:
        while left and time.monotonic() < deadline:
            with contextlib.suppress(IndexError):  # another thread took the last one
                left.popleft().kill(request_timeout=_EXIT_REQUEST_S)

    threads: list[threading.Thread] = []
    # Threads, for the SDK's async client crashes an interpreter that exits right after it.
    for _ in range(min(len(leases), _EXIT_THREADS)):
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # from 3.12 on an interpreter that is exiting starts none
            work()
            break
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [lease.sandbox_id for lease in leases if not lease.killed]


def _enlist(lease: Lease) -> None:
    with _lock:
        _live[lease.sandbox_id] = lease


def _at_exit() -> None:
    exiting.set()
    try:
        left = kill_all(timeout_s=max(5.0, wait_for_creations(_EXIT_S)))
        # A thread that comes back from the SDK into an interpreter that is gone would abort it.
        wait_for_calls(_EXIT_CALLS_S)
    except Exception:  # nothing may stop the interpreter from exiting
        logger.exception("the remaining sandboxes could not be killed")
        return
    if left:
        logger.warning("not killed at exit, run a sweep: %s", ", ".join(left))


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _live.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
