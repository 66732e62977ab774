"""The one error that handlers raise, and the one table of what every other becomes."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from twinkle_isolation import GuestError, SandboxLostError

logger = logging.getLogger(__name__)

CONNECT_STATUS: Mapping[str, int] = {
    "already_exists": 409,
    "canceled": 499,
    "data_loss": 500,
    "deadline_exceeded": 504,
    "failed_precondition": 400,
    "internal": 500,
    "invalid_argument": 400,
    "not_found": 404,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "unauthenticated": 401,
    "unavailable": 503,
    "unimplemented": 501,
}
"""HTTP status of each code of the Connect protocol."""

_CODE_OF_STATUS = {status: code for code, status in CONNECT_STATUS.items()} | {
    400: "invalid_argument",
    413: "resource_exhausted",
    500: "internal",
    502: "unavailable",
    507: "resource_exhausted",
}


class ApiError(Exception):
    """A request that is answered with an error. "Raises 404" in a docstring means this one.

    Attributes:
        status: HTTP status.
        code: Word for it in the Connect protocol.
        message: What was asked, what was found, what to do.
        retry_after_s: For the `Retry-After` header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or _CODE_OF_STATUS.get(status, "internal")
        self.retry_after_s = retry_after_s


def as_api_error(error: Exception, *, lost_status: int = 502) -> ApiError:
    """Return the answer for whatever a handler raised.

    Args:
        error: The exception; one that no row is for is the server's own fault, and logged.
        lost_status: For a sandbox that ended: 404 in the control API; 502 to requests for the
            sandbox itself, as E2B's proxy answers.
    """
    match error:
        case ApiError():
            return error
        case ValidationError():
            return ApiError(400, _words(error))
        case GuestError(code="no_space"):
            return ApiError(507, f"not enough space in the sandbox: {error.message}")
        case GuestError():
            status = CONNECT_STATUS.get(error.code, 500)
            return ApiError(status, error.message, code=error.code)
        case SandboxLostError():
            return ApiError(lost_status, f"the sandbox was not found: {error}")
        case TimeoutError():
            return ApiError(504, "the request took longer than its deadline")
        case ClientDisconnect():
            return ApiError(499, "the client left before its request was complete")
        case _:
            logger.error("a handler failed", exc_info=error)
            return ApiError(500, f"internal error: {type(error).__name__}: {error}")


def _words(error: ValidationError) -> str:
    """Say the first thing that is wrong with a request."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"])) or "the request"
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}, found {reprlib.repr(first['input'])}"
