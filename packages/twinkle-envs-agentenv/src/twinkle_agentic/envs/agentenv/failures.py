"""What the `e2b` SDK raised, read as what happened.

The SDK decodes a body as JSON before it looks at the status, raises a file error for a dead sandbox
and a timeout for a refused connection. So the type of its exception proves little: the status and
the server's words are taken from wherever they are, and whether a sandbox lives is asked of the
server.
"""

from __future__ import annotations

import random
import re
import time
import traceback
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx
from e2b import Sandbox, SandboxInfo
from e2b.exceptions import (
    AuthenticationException,
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    SandboxUnreachableException,
    ServiceBusyException,
    TimeoutException,
)

from twinkle_agentic.envs.agentenv.connection import Connection
from twinkle_agentic.envs.agentenv.waiting import in_flight

__all__ = [
    "Failure",
    "Fault",
    "Probe",
    "SandboxState",
    "comes_from_sdk",
    "probe",
    "probe_info",
    "read_failure",
]

_WORDS_CHARS = 500  # of a server's answer that are quoted
_STATUS = re.compile(r"(\d{3}): ")  # how the SDK begins the text of an error without `status_code`
_ADVICE = re.compile(  # what the SDK appends for its own users
    r": (The sandbox (was killed or|could not be reached|is running but)|This error is likely due|"
    r"The request was cancelled by|Rate limit exceeded).*"
)
_PROBE_TIMEOUT_S = 10.0
_PROBE_DELAYS_S = (0.3, 1.0)  # between the tries of a probe that got no answer


class Fault(StrEnum):
    """What happened to a request."""

    REFUSED = "refused"
    """4xx: the same request will be refused again."""
    UNAUTHORIZED = "unauthorized"
    """401 or 403."""
    METHOD = "method"
    """405: the server does not know this form of the request."""
    NOT_FOUND = "not_found"
    """404; says nothing about the sandbox."""
    FULL = "full"
    """429 or 503: no room now. The request had no effect."""
    SERVER = "server"
    """Another 5xx, or an answer that is none."""
    TIMEOUT = "timeout"
    """No answer in time; the request may have had its effect."""
    UNREACHABLE = "unreachable"
    """No connection, or one that broke."""
    PAUSED = "paused"
    """410: the sandbox is paused and the server does not resume it on access."""
    BAD_ARGUMENT = "bad_argument"
    """The request makes no sense inside this sandbox: a missing file, a full disk, a bad path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed request.

    Attributes:
        fault: What happened.
        words: The server's own words, or the SDK's.
        status: The HTTP status, where there was one and it could be found.
        retry_after_s: What the server asked to wait, where it did.
        ambiguous: The request may have had its effect.
    """

    fault: Fault
    words: str
    status: int | None = None
    retry_after_s: float | None = None
    ambiguous: bool = False

    def delay_s(self, tries: int, *, first_s: float, longest_s: float) -> float:
        """Return the seconds until the next try: as asked, or doubled each time and partly random.

        Args:
            tries: How many have failed, this one included.
            first_s: The most after the first.
            longest_s: The most after any.
        """
        if self.retry_after_s is not None:
            return self.retry_after_s
        return min(first_s * 2 ** (tries - 1), longest_s) * random.uniform(0.5, 1.0)


def read_failure(error: BaseException) -> Failure:
    """Read what happened from an exception of the SDK."""
    response = _response_of(error)
    status = _status_of(error, response)
    words = _words_of(error)
    if status is not None and status >= 400:
        retry_after_s = _retry_after(response)
        fault = _FAULT_OF_STATUS.get(status, Fault.SERVER if status >= 500 else Fault.REFUSED)
        if "not proxyable" in words:
            fault = Fault.PAUSED
        return Failure(
            fault=fault,
            words=f"{status}: {words}" if not words.startswith(str(status)) else words,
            status=status,
            retry_after_s=retry_after_s,
            ambiguous=fault is Fault.SERVER,
        )
    if isinstance(
        error, (FileNotFoundException, InvalidArgumentException, NotEnoughSpaceException)
    ):
        return Failure(fault=Fault.BAD_ARGUMENT, words=words)
    if isinstance(error, NotFoundException):
        return Failure(fault=Fault.NOT_FOUND, words=words)
    if isinstance(error, (SandboxUnreachableException, SandboxNotRunningException)):
        return Failure(fault=Fault.UNREACHABLE, words=words, ambiguous=True)
    if isinstance(error, (TimeoutException, httpx.TimeoutException, TimeoutError)):
        return Failure(fault=Fault.TIMEOUT, words=words, ambiguous=True)
    if isinstance(error, (httpx.ConnectError, ConnectionRefusedError)):
        return Failure(fault=Fault.UNREACHABLE, words=words)
    if isinstance(error, (httpx.HTTPError, OSError)):
        return Failure(fault=Fault.UNREACHABLE, words=words, ambiguous=True)
    if isinstance(error, SandboxException) and "not proxyable" in words:
        return Failure(fault=Fault.PAUSED, words=words, status=410)
    # An answer that could not be decoded, a stream without its end, an error without a code.
    return Failure(fault=Fault.SERVER, words=words, ambiguous=True)


class SandboxState(StrEnum):
    """What the server says of a sandbox."""

    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"
    """The server knows no such sandbox."""
    UNKNOWN = "unknown"
    """The server gave no answer, or one that does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An answer of `probe`."""

    state: SandboxState
    words: str = ""


def probe(sandbox_id: str, connection: Connection, *, tries: int = 3) -> Probe:
    """Ask the server whether a sandbox exists; waits at most about half a minute."""
    found = Probe(state=SandboxState.UNKNOWN)
    for attempt in range(tries):
        if attempt:
            time.sleep(_PROBE_DELAYS_S[min(attempt, len(_PROBE_DELAYS_S)) - 1])
        params = connection.params(
            request_timeout=min(_PROBE_TIMEOUT_S, connection.request_timeout), retries=0
        )
        try:
            with in_flight():
                info = Sandbox.get_info(sandbox_id, **params)
            state = str(getattr(info.state, "value", "running"))
        except Exception as error:
            failure = read_failure(error)
            if failure.fault is Fault.NOT_FOUND:
                return Probe(state=SandboxState.GONE, words=failure.words)
            found = Probe(state=SandboxState.UNKNOWN, words=failure.words)
            # Another try changes nothing; a refused connection the SDK has tried four times.
            unreachable = failure.fault is Fault.UNREACHABLE and not failure.ambiguous
            if unreachable or failure.fault in (Fault.UNAUTHORIZED, Fault.REFUSED, Fault.METHOD):
                return found
        else:
            paused = state == SandboxState.PAUSED
            return Probe(state=SandboxState.PAUSED if paused else SandboxState.RUNNING)
    return found


def probe_info(sandbox_id: str, connection: Connection) -> SandboxInfo | None:
    """Return what the server tells of a sandbox, where it does."""
    try:
        return Sandbox.get_info(sandbox_id, **connection.params(retries=0))
    except Exception:
        return None


def comes_from_sdk(error: BaseException) -> bool:
    """Tell an exception raised below the SDK from one of the caller's own code."""
    if isinstance(
        error, (SandboxException, AuthenticationException, ServiceBusyException, httpx.HTTPError)
    ):
        return True
    modules = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(
        str(module).partition(".")[0] in ("e2b", "connectrpc", "pyqwest") for module in modules
    )


_FAULT_OF_STATUS = {
    401: Fault.UNAUTHORIZED,
    403: Fault.UNAUTHORIZED,
    404: Fault.NOT_FOUND,
    405: Fault.METHOD,
    410: Fault.PAUSED,
    408: Fault.TIMEOUT,
    425: Fault.FULL,
    429: Fault.FULL,
    503: Fault.FULL,
}


def _status_of(error: BaseException, response: Any) -> int | None:
    if isinstance(error, SandboxNotFoundException):
        return 404
    if isinstance(error, AuthenticationException):
        return 401
    if isinstance(error, (RateLimitException, ServiceBusyException)):
        return int(error.status_code or 429)
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status
    quoted = _STATUS.match(str(error)) if type(error) is SandboxException else None
    if quoted is not None:
        return int(quoted[1])
    # From here on the status is only that of a body which could not be decoded.
    if (
        isinstance(error, (ValueError, KeyError, TypeError, AttributeError))
        and response is not None
    ):
        return int(response.status_code)
    return None


def _response_of(error: BaseException) -> Any:
    """Return the response the SDK was reading when it raised, with its status and headers.

    The exception does not carry it, the frames it passed through do.
    """
    found: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if not str(frame.f_globals.get("__name__", "")).startswith("e2b."):
            continue
        for name in ("response", "res", "r"):
            candidate = frame.f_locals.get(name)
            if hasattr(candidate, "status_code") and hasattr(candidate, "headers"):
                found = candidate
    return found


def _words_of(error: BaseException) -> str:
    body = getattr(error, "doc", None)  # of a JSONDecodeError: the text that is no JSON
    if isinstance(body, str):
        return " ".join(body.split())[:_WORDS_CHARS] or "(an empty answer)"
    text = _ADVICE.sub("", " ".join(str(error).split()))[:_WORDS_CHARS]
    return text or type(error).__name__


def _retry_after(response: Any) -> float | None:
    value: object = response.headers.get("retry-after") if response is not None else None
    try:
        seconds = float(str(value))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None
