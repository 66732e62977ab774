"""A sandbox that this process holds: its lifetime, whether it is lost, and its certain end.

Every handle is in one process-wide list until its sandbox has been killed. What is left there is
killed when the interpreter exits.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, Concatenate, ParamSpec, TypeVar

from e2b import Sandbox

from twinkle_agentic.envs.agentenv._config import SandboxSpec
from twinkle_agentic.envs.agentenv._sdk_calls import (
    calls,
    check_process,
    creations,
    exiting,
    interruptible,
)
from twinkle_agentic.envs.agentenv._sdk_errors import FailureKind, read_failure
from twinkle_agentic.envs.errors import (
    EnvTimeoutError,
    SandboxError,
    SandboxLostError,
    TwinkleEnvError,
)

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_MARGIN_S = 30.0  # a sandbox outlasts the command that runs in it by this much
_RENEW_AFTER = 0.05  # of the idle time: what must have passed before a step renews it
_EXIT_S = 15.0  # the exit of the interpreter waits this long for pending creations and for kills
_EXIT_CALLS_S = 5.0  # and this long for calls that end because their sandboxes did
_EXIT_REQUEST_S = 5.0
_EXIT_THREADS = 16

_lock = threading.Lock()
_live: dict[str, SandboxHandle] = {}


class SandboxHandle:
    """One sandbox and the time it has.

    Args:
        sandbox: The SDK's handle.
        spec: What it was made from.
        asked_at: `time.monotonic()` before the request that set its time.
        setup_output: What the setup commands printed.

    Attributes:
        answered: A request to the sandbox itself, not to the server, has succeeded.
        prepared: A fork that no episode has used yet: the first `reset` keeps it.
        failure: Why it cannot be used any more; `None` while it can.
        failures_in_row: Steps since the last one that did not fail because of the sandbox.
        killed: It has been killed from here, or the server does not know it.
    """

    def __init__(
        self, sandbox: Sandbox, spec: SandboxSpec, *, asked_at: float, setup_output: str = ""
    ) -> None:
        self.sandbox = sandbox
        self.spec = spec
        self.setup_output = setup_output
        self.answered = False
        self.prepared = False
        self.failure: TwinkleEnvError | None = None
        self.failures_in_row = 0
        self.killed = False
        self._expires_at = asked_at + spec.sandbox_timeout_s
        self._kill_lock = threading.Lock()
        self._pid = os.getpid()
        with _lock:
            _live[self.sandbox_id] = self

    @property
    def sandbox_id(self) -> str:
        """The sandbox's id."""
        return self.sandbox.sandbox_id

    def use(
        self,
        function: Callable[Concatenate[SandboxHandle, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return `function(self, ...)`, interruptible by Ctrl-C; remember when the sandbox is lost.

        Raises:
            SandboxError: It is lost or fails, or the interpreter exits.
            EnvTimeoutError: It does not answer; it is not asked again.
            Exception: Whatever else the function raises.
        """
        if self.failure is not None:
            raise _without_traceback(self.failure)
        if exiting.is_set():
            raise SandboxError("the interpreter exits")
        try:
            return interruptible(function, self, *args, **kwargs)
        except (SandboxLostError, EnvTimeoutError) as error:
            self.failure = _without_traceback(error)
            raise

    def lost(self, why: str) -> SandboxLostError:
        """Make the error of a sandbox that is lost."""
        return SandboxLostError(
            f"sandbox {self.sandbox_id} is lost: {why}; call reset() for a new one"
        )

    def extend_lifetime_to_cover(self, seconds: float) -> None:
        """Extend the sandbox's lifetime beyond a command of `seconds`.

        Where that fails, the command says so.
        """
        if self._expires_at - monotonic() < seconds + _MARGIN_S:
            # With a margin more than needed, the next command of that length asks for nothing.
            with contextlib.suppress(Exception):
                self._extend(max(seconds + 2 * _MARGIN_S, self.spec.sandbox_timeout_s))

    def renew(self) -> str | None:
        """Start the idle time anew, unless hardly any of it has passed.

        Returns:
            Why that failed; `None` where it did not.
        """
        idle_s = self.spec.sandbox_timeout_s
        if self._expires_at - monotonic() < idle_s * (1 - _RENEW_AFTER):
            try:
                self._extend(idle_s)
            except Exception as error:
                return read_failure(error).words
        return None

    def resume(self) -> None:
        """Wake a paused sandbox.

        Raises:
            SandboxLostError: It does not wake.
        """
        try:
            self._extend(self.spec.sandbox_timeout_s)
        except Exception as error:
            words = read_failure(error).words
            raise self.lost(f"it is paused and cannot be resumed ({words})") from error

    def kill(self, *, request_timeout: float | None = None) -> bool:
        """End the sandbox; calling it again does nothing.

        Args:
            request_timeout: Seconds for one try only; by default as the connection has it.

        Returns:
            Whether it has certainly ended. If not, the exit of the interpreter tries once more, and
            then its timeout and `sweep` are left.
        """
        if self._pid != os.getpid():  # it belongs to the process this one was forked from
            return False
        once = {"request_timeout": request_timeout, "retries": 0} if request_timeout else {}
        return interruptible(self._kill, once)

    def forget(self) -> None:
        """Take the sandbox for killed."""
        self.killed = True
        with _lock:
            _live.pop(self.sandbox_id, None)

    def _kill(self, options: Mapping[str, Any]) -> bool:
        with calls, self._kill_lock:
            if self.killed:
                return True
            try:
                self.sandbox.kill(**options)
            except Exception as error:
                failure = read_failure(error)
                if failure.kind is not FailureKind.NOT_FOUND:
                    logger.warning(
                        "sandbox %s could not be killed (%s): it is left to its timeout of %g s, "
                        "the exit of this process and a sweep",
                        self.sandbox_id,
                        failure.words,
                        self.spec.sandbox_timeout_s,
                    )
                    return False
            self.forget()
        return True

    def _extend(self, seconds: float) -> None:
        # `connect` never shortens what the sandbox has, `set_timeout` would.
        check_process()
        asked_at = monotonic()
        with calls:
            self.sandbox.connect(timeout=math.ceil(seconds))
        self._expires_at = max(self._expires_at, asked_at + math.ceil(seconds))


def live_handles() -> list[SandboxHandle]:
    """Return the handles of this process whose sandboxes have not been killed."""
    with _lock:
        return list(_live.values())


def kill_all(*, timeout_s: float = _EXIT_S) -> list[str]:
    """Kill every sandbox that this process still holds, several at once.

    Args:
        timeout_s: Seconds to wait for the answers.

    Returns:
        The ids of those that have not certainly ended.
    """
    handles = live_handles()
    left = deque(handles)
    deadline = monotonic() + timeout_s

    def work() -> None:
        while left and monotonic() < deadline:
            with contextlib.suppress(IndexError):  # another thread took the last one
                left.popleft().kill(request_timeout=_EXIT_REQUEST_S)

    threads: list[threading.Thread] = []
    # Threads, since the SDK's async client crashes an interpreter that exits right after it.
    for _ in range(min(len(handles), _EXIT_THREADS)):
        thread = threading.Thread(target=work, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # from 3.12 on an interpreter that exits starts none
            work()
            break
        threads.append(thread)
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    return [handle.sandbox_id for handle in handles if not handle.killed]


def _without_traceback(error: TwinkleEnvError) -> TwinkleEnvError:
    """Return the error without the frames it passed through, which keep everything alive."""
    return type(error)(str(error), retryable=error.retryable)


def _at_exit() -> None:
    exiting.set()
    try:
        left = kill_all(timeout_s=max(5.0, creations.wait_until_none(_EXIT_S)))
        # A thread that returns from the SDK into an interpreter that has ended would abort it.
        calls.wait_until_none(_EXIT_CALLS_S)
    except Exception:  # nothing may stop the interpreter from exiting
        logger.exception("the remaining sandboxes could not be killed")
        return
    if left:
        logger.warning("not killed at exit, run a sweep: %s", ", ".join(left))


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_live.clear)  # they are the parent's
