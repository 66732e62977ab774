"""What follows a failed request: another try after a while, or the error that says what is true.

How often and how long is decided here and nowhere else: `CREATION` for creations and forks,
`REQUEST` for requests to a sandbox. (Kills and connects are left to the SDK's own retries.)
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from e2b import Sandbox, SandboxState

from twinkle_agentic.envs.agentenv._handle import SandboxHandle
from twinkle_agentic.envs.agentenv._sdk_calls import calls
from twinkle_agentic.envs.agentenv._sdk_errors import FailureKind, RequestFailure, read_failure
from twinkle_agentic.envs.agentenv.errors import ToolFaultError
from twinkle_agentic.envs.errors import EnvTimeoutError, SandboxError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Growing, jittered delays between tries.

    Attributes:
        first_s: The longest delay after the first try; it doubles with each further one.
        longest_s: The longest delay after any try.
        attempts: Tries in all; a full server is asked until the time allowed has passed instead.
    """

    first_s: float
    longest_s: float
    attempts: int | None = None

    def delay_s(self, failure: RequestFailure, tries: int) -> float | None:
        """Return the seconds until the next try; `None` where there is to be none.

        Args:
            failure: That of the last try; a delay that the server asks for is kept.
            tries: How many have failed.
        """
        full = failure.kind is FailureKind.FULL
        if self.attempts is not None and tries >= self.attempts and not full:
            return None
        if failure.retry_after_s is not None:
            return failure.retry_after_s + random.uniform(0, self.first_s)
        return min(self.first_s * 2 ** (tries - 1), self.longest_s) * random.uniform(0.5, 1.0)


CREATION = Backoff(first_s=0.25, longest_s=5.0, attempts=4)
"""Within `capacity_timeout_s`, at most 4 tries unless the server is full."""
REQUEST = Backoff(first_s=0.1, longest_s=1.0)
"""Within `_SETTLED_S`, or `ready_timeout_s` for the first request to a new sandbox."""

_SETTLED_S = 2.0  # a request to a sandbox that has answered before is tried again for this long
_FINAL = (FailureKind.UNAUTHORIZED, FailureKind.REFUSED, FailureKind.METHOD)
_PROBE_TIMEOUT_S = 10.0
_PROBE_DELAYS_S = (0.3, 1.0)  # between the tries of a probe that got no answer


def repeated(
    handle: SandboxHandle, doing: str, call: Callable[[], T], *, repeatable: bool = True
) -> T:
    """Make a request to a sandbox, again where it failed and that can do no harm.

    A new sandbox may be there before the agent in it answers, so its first request is tried again
    for `spec.ready_timeout_s`, any later one for 2 s, and `spec.capacity_timeout_s` where the
    server is busy.

    Args:
        handle: The sandbox.
        doing: What is asked of it, for messages.
        call: Makes the request.
        repeatable: Doing it twice does no harm.

    Raises:
        ToolFaultError: The request was wrong, the sandbox is well.
        SandboxLostError: The sandbox is lost, or neither it nor the server answers.
        EnvTimeoutError: It gave no answer in time though the server says it runs.
        SandboxError: The request failed and the sandbox runs.
    """
    started = time.monotonic()
    tries = 0
    resumed = False
    while True:
        tries += 1
        try:
            with calls:
                value = call()
            handle.answered = True
            return value
        except ToolFaultError:
            raise
        except Exception as error:
            failure = read_failure(error)
            if _needs_resume(handle, failure, error):
                if resumed:
                    raise handle.lost("it is paused and does not resume") from error
                resumed = True
                handle.resume()
                continue
            cause = error
        may_repeat = repeatable or not handle.answered or not failure.ambiguous
        window_s = _SETTLED_S if handle.answered else handle.spec.ready_timeout_s
        if failure.kind is FailureKind.FULL:
            window_s = max(window_s, handle.spec.capacity_timeout_s)
        delay = REQUEST.delay_s(failure, tries) or 0.0
        late = time.monotonic() + delay > started + window_s
        if failure.kind is FailureKind.TIMEOUT or not may_repeat or late:
            raise _given_up(handle, doing, failure, tries) from cause
        time.sleep(delay)


def check_alive(handle: SandboxHandle, why: str, *, tries: int = 3) -> bool:
    """Ask the server for a sandbox; return whether it is paused. Waits at most half a minute.

    Raises:
        SandboxLostError: The server does not know it or, with more than one try, does not answer.
    """
    connection = handle.spec.connection
    request_timeout = min(_PROBE_TIMEOUT_S, connection.request_timeout)
    words = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(_PROBE_DELAYS_S[min(attempt, len(_PROBE_DELAYS_S)) - 1])
        params = connection.params(request_timeout=request_timeout, retries=0)
        try:
            with calls:
                info = Sandbox.get_info(handle.sandbox_id, **params)
            return info.state == SandboxState.PAUSED
        except Exception as error:
            failure = read_failure(error)
            words = failure.words
            if failure.kind is FailureKind.NOT_FOUND:
                raise handle.lost(f"the server knows it no more ({why})") from error
            # Another try changes nothing; a refused connection the SDK has tried four times.
            refused = failure.kind is FailureKind.UNREACHABLE and not failure.ambiguous
            if refused or failure.kind in _FINAL:
                break
    if tries > 1:
        raise handle.lost(f"neither it ({why}) nor the server answers ({words})")
    return False


def _needs_resume(handle: SandboxHandle, failure: RequestFailure, error: Exception) -> bool:
    """Tell whether the sandbox is paused; raise the error that no further try can mend."""
    if failure.kind is FailureKind.FULL:
        return False
    if failure.kind is not FailureKind.BAD_ARGUMENT:
        missing_file = failure.kind is FailureKind.MISSING_FILE
        paused = check_alive(handle, failure.words, tries=1 if missing_file else 3)
        if not missing_file and (paused or failure.kind is FailureKind.PAUSED):
            return True
    if failure.status == 401:
        refused = handle.lost(f"it refuses the credentials it was created with ({failure.words})")
        refused.retryable = False
        raise refused from error
    if failure.kind in (*_FINAL, FailureKind.BAD_ARGUMENT, FailureKind.MISSING_FILE):
        raise ToolFaultError(failure.words) from error
    return False


def _given_up(handle: SandboxHandle, doing: str, failure: RequestFailure, tries: int) -> Exception:
    if failure.kind is FailureKind.NOT_FOUND:
        return handle.lost(f"it is not found though the server lists it ({failure.words})")
    text = f"{doing} in sandbox {handle.sandbox_id} failed after {tries} tries: {failure.words}"
    if failure.kind is FailureKind.TIMEOUT:
        return EnvTimeoutError(f"{text}; the server says that the sandbox runs")
    return SandboxError(text, retryable=True)
