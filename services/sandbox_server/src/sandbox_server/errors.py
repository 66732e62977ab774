"""The one error that handlers raise; it becomes a JSON answer."""

from __future__ import annotations

from collections.abc import Mapping

from twinkle_isolation import GuestError, SandboxLostError

__all__ = ["CONNECT_STATUS", "ApiError", "connect_code", "from_guest", "from_lost"]

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


class ApiError(Exception):
    """A request that is answered with an error.

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
        self.code = code or connect_code(status)
        self.retry_after_s = retry_after_s


def connect_code(status: int) -> str:
    """Return the Connect code that fits an HTTP status."""
    special = {
        500: "internal",
        400: "invalid_argument",
        413: "resource_exhausted",
        502: "unavailable",
        507: "resource_exhausted",
    }
    if status in special:
        return special[status]
    return next((code for code, number in CONNECT_STATUS.items() if number == status), "internal")


def from_guest(error: GuestError) -> ApiError:
    """Return the answer for a sandbox's own refusal."""
    if error.code == "no_space":
        return ApiError(
            507, f"not enough space in the sandbox: {error.message}", code="resource_exhausted"
        )
    return ApiError(CONNECT_STATUS.get(error.code, 500), error.message, code=error.code)


def from_lost(sandbox_id: str, error: SandboxLostError) -> ApiError:
    """Return the answer for a sandbox that ended while it was asked."""
    return ApiError(404, f"sandbox {sandbox_id!r} was not found: {error}")
