"""What follows a failed request to a sandbox: another try, or the error that is true."""

from __future__ import annotations

import time

from e2b.exceptions import NotFoundException

from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.envs.agentenv.failures import (
    Failure,
    Fault,
    SandboxState,
    probe,
    read_failure,
)
from twinkle_agentic.envs.agentenv.lease import Lease
from twinkle_agentic.envs.errors import EnvTimeoutError, SandboxError, SandboxLostError

__all__ = ["Recovery", "check_alive", "lost"]

_SETTLED_RETRY_S = 2.0  # a sandbox that had answered before is tried again for this long
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 1.0


class Recovery:
    """The tries of one request.

    A new sandbox may be there before the agent in it answers, so its first request is tried again
    for `spec.ready_timeout_s`; later ones only where that can do no harm.

    Args:
        lease: The sandbox.
        doing: What is asked of it, for messages.
        repeatable: Doing it twice does no harm.
    """

    def __init__(self, lease: Lease, doing: str, *, repeatable: bool) -> None:
        self._lease = lease
        self._doing = doing
        self._repeatable = repeatable
        self._tries = 0
        self._resumed = False
        window_s = lease.spec.ready_timeout_s if lease.fresh else _SETTLED_RETRY_S
        self._begun = time.monotonic()
        self._until = self._begun + window_s

    def again(self, error: Exception) -> None:
        """Return when the request is to be tried again.

        Raises:
            ToolFaultError: The request was wrong, the sandbox is well.
            SandboxLostError: The sandbox is gone, or nobody answers for it.
            EnvTimeoutError: It gave no answer in time though the server says it runs.
            SandboxError: The request failed and the sandbox runs.
        """
        failure = read_failure(error)
        self._tries += 1
        if failure.fault is Fault.FULL:
            self._wait(failure, error)
            return
        if failure.fault is Fault.BAD_ARGUMENT and not _says_missing(error):
            raise ToolFaultError(failure.words) from error
        found = probe(self._lease.sandbox_id, self._lease.spec.connection)
        if found.state is SandboxState.GONE:
            raise lost(self._lease, f"the server knows it no more ({failure.words})") from error
        if failure.fault is Fault.BAD_ARGUMENT:
            raise ToolFaultError(failure.words) from error
        if found.state is SandboxState.UNKNOWN:
            raise lost(
                self._lease,
                f"neither it ({failure.words}) nor the server answers ({found.words})",
            ) from error
        if failure.fault is Fault.PAUSED or found.state is SandboxState.PAUSED:
            self._resume(error)
            return
        self._running(failure, error)

    def _running(self, failure: Failure, error: Exception) -> None:
        """Deal with a failure of a sandbox that, as the server says, runs."""
        match failure.fault:
            case Fault.UNAUTHORIZED if failure.status != 403:
                raise SandboxLostError(
                    f"sandbox {self._lease.sandbox_id} refuses the credentials it was created with "
                    f"({failure.words}): call reset() for a new one",
                    retryable=False,
                ) from error
            case Fault.UNAUTHORIZED | Fault.REFUSED | Fault.METHOD:
                raise ToolFaultError(failure.words) from error
            case _:
                self._wait(failure, error)

    def _wait(self, failure: Failure, error: Exception) -> None:
        harmless = (
            self._repeatable
            or self._lease.fresh
            or failure.fault is Fault.FULL
            or not failure.ambiguous
        )
        delay = failure.delay_s(self._tries, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S)
        until = self._until
        if failure.fault is Fault.FULL:
            until = max(until, self._begun + self._lease.spec.capacity_timeout_s)
        if failure.fault is Fault.TIMEOUT or not harmless or time.monotonic() + delay > until:
            raise self._failed(failure) from error
        time.sleep(delay)

    def _failed(self, failure: Failure) -> Exception:
        text = (
            f"{self._doing} in sandbox {self._lease.sandbox_id} failed after {self._tries} tries: "
            f"{failure.words}"
        )
        if failure.fault is Fault.NOT_FOUND:
            return lost(
                self._lease, f"it is not found though the server lists it ({failure.words})"
            )
        if failure.fault is Fault.TIMEOUT:
            return EnvTimeoutError(f"{text}; the server says that the sandbox runs")
        return SandboxError(text, retryable=True)

    def _resume(self, error: Exception) -> None:
        if self._resumed:
            raise lost(self._lease, "it is paused and does not resume") from error
        self._resumed = True
        try:
            self._lease.resume()
        except Exception as again:
            words = read_failure(again).words
            raise lost(self._lease, f"it is paused and cannot be resumed ({words})") from again


def lost(lease: Lease, why: str) -> SandboxLostError:
    """Make the error of a sandbox that is gone."""
    return SandboxLostError(
        f"sandbox {lease.sandbox_id} is lost: {why}; call reset() for a new one"
    )


def check_alive(lease: Lease, why: str, *, tries: int = 3) -> None:
    """Ask the server for a sandbox.

    Raises:
        SandboxLostError: The server knows it no more or, with more than one try, does not answer.
    """
    found = probe(lease.sandbox_id, lease.spec.connection, tries=tries)
    if found.state is SandboxState.GONE:
        raise lost(lease, f"the server knows it no more ({why})")
    if found.state is SandboxState.UNKNOWN and tries > 1:
        raise lost(lease, f"neither it ({why}) nor the server answers ({found.words})")


def _says_missing(error: Exception) -> bool:
    """A missing file and a missing sandbox are the same exception."""
    return isinstance(error, NotFoundException)
