"""What the `e2b` SDK raised, read as what happened: the only module that knows its exceptions.

The SDK decodes a body as JSON before it looks at the status, raises a file error for a dead sandbox
and a timeout for a refused connection. So the type of an exception proves little: the status and
the server's words are taken from wherever they are.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httpx
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

_WORDS_CHARS = 500  # of a server's answer that are quoted
_STATUS = re.compile(r"(\d{3}): ")  # how the SDK begins the text of an error without `status_code`
_ADVICE = re.compile(  # what the SDK appends for its own users
    r": (The sandbox (was killed or|could not be reached|is running but)|This error is likely due|"
    r"The request was cancelled by|Rate limit exceeded).*"
)


class FailureKind(StrEnum):
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
    """Another 5xx, or an answer that cannot be read."""
    TIMEOUT = "timeout"
    """No answer in time; the request may have had its effect."""
    UNREACHABLE = "unreachable"
    """No connection, or one that broke."""
    PAUSED = "paused"
    """410: the sandbox is paused and the server does not resume it on access."""
    BAD_ARGUMENT = "bad_argument"
    """The request makes no sense inside this sandbox: a full disk, a bad path."""
    MISSING_FILE = "missing_file"
    """The file is missing, or the sandbox: the SDK raises the same for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """A failed request.

    Attributes:
        kind: What happened.
        words: The server's own words, or the SDK's.
        status: The HTTP status, where there was one and it could be found.
        retry_after_s: Seconds the server asked to wait, where it did.
        ambiguous: The request may have had its effect.
    """

    kind: FailureKind
    words: str
    status: int | None = None
    retry_after_s: float | None = None
    ambiguous: bool = False


_KIND_OF_STATUS = {
    401: FailureKind.UNAUTHORIZED,
    403: FailureKind.UNAUTHORIZED,
    404: FailureKind.NOT_FOUND,
    405: FailureKind.METHOD,
    408: FailureKind.TIMEOUT,
    410: FailureKind.PAUSED,
    425: FailureKind.FULL,
    429: FailureKind.FULL,
    503: FailureKind.FULL,
}

# Exceptions without a status: the kind, and whether the request may have had its effect. The first
# match counts.
_KIND_OF_EXCEPTION: list[tuple[tuple[type[BaseException], ...], FailureKind, bool]] = [
    ((FileNotFoundException,), FailureKind.MISSING_FILE, False),
    ((InvalidArgumentException, NotEnoughSpaceException), FailureKind.BAD_ARGUMENT, False),
    ((NotFoundException,), FailureKind.NOT_FOUND, False),
    ((SandboxUnreachableException,), FailureKind.UNREACHABLE, True),
    ((SandboxNotRunningException,), FailureKind.UNREACHABLE, True),
    ((TimeoutException, httpx.TimeoutException, TimeoutError), FailureKind.TIMEOUT, True),
    ((httpx.ConnectError, ConnectionRefusedError), FailureKind.UNREACHABLE, False),
    ((httpx.HTTPError, OSError), FailureKind.UNREACHABLE, True),
    # An answer that could not be decoded, a stream without its end, an error without a code.
    ((BaseException,), FailureKind.SERVER, True),
]


def read_failure(error: BaseException) -> RequestFailure:
    """Read what happened from an exception of the SDK."""
    response = _response_of(error)
    status = _status_of(error, response)
    words = _words_of(error)
    if status is not None and status >= 400:
        default = FailureKind.SERVER if status >= 500 else FailureKind.REFUSED
        kind = _KIND_OF_STATUS.get(status, default)
        ambiguous = kind is FailureKind.SERVER
        if not words.startswith(str(status)):
            words = f"{status}: {words}"
    else:
        _, kind, ambiguous = next(row for row in _KIND_OF_EXCEPTION if isinstance(error, row[0]))
    if "not proxyable" in words and (status or isinstance(error, SandboxException)):
        kind, ambiguous = FailureKind.PAUSED, False
    return RequestFailure(
        kind=kind,
        words=words,
        status=status,
        retry_after_s=_retry_after(response),
        ambiguous=ambiguous,
    )


def comes_from_sdk(error: BaseException) -> bool:
    """Tell an exception raised below the SDK from one of the caller's own code."""
    if isinstance(
        error, (SandboxException, AuthenticationException, ServiceBusyException, httpx.HTTPError)
    ):
        return True
    return any(
        _module_of(frame).partition(".")[0] in ("e2b", "connectrpc", "pyqwest")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


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
    # Otherwise the response tells the status only of a body that could not be decoded.
    decoding = isinstance(error, (ValueError, KeyError, TypeError, AttributeError))
    return int(response.status_code) if decoding and response is not None else None


def _response_of(error: BaseException) -> Any:
    """Return the response the SDK was reading when it raised, with its status and headers.

    The exception does not carry it, the frames it passed through do.
    """
    found: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if _module_of(frame).startswith("e2b."):
            for name in ("response", "res", "r"):
                candidate = frame.f_locals.get(name)
                if hasattr(candidate, "status_code") and hasattr(candidate, "headers"):
                    found = candidate
    return found


def _module_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
