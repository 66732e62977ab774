"""What can go wrong between a rollout and a model endpoint.

```
ApiError (RuntimeError)                kind, status, retryable, retry_after_s, attempts
├── ApiStatusError                     the server refused or failed: HTTP status
│   └── ContextLengthError             the prompt does not fit the model's context
├── ApiConnectionError (ConnectionError)   no connection, or it broke
├── ApiTimeoutError (TimeoutError)     no complete answer within the limit
└── ApiReplyError (ValueError)         an answer that is no completion, or too large
```
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "ApiConnectionError",
    "ApiError",
    "ApiErrorKind",
    "ApiReplyError",
    "ApiStatusError",
    "ApiTimeoutError",
    "ContextLengthError",
]


class ApiErrorKind(StrEnum):
    """The class of a failed request; the `error_kind` of a trajectory that ended in one."""

    RATE_LIMITED = "rate_limited"
    """HTTP 429."""
    SERVER_ERROR = "server_error"
    """HTTP 5xx (or 408, 409), or an error object with such a code in a reply with status 200."""
    REFUSED = "refused"
    """Any other HTTP status: the same request would be refused again."""
    CONTEXT_LENGTH = "context_length"
    """The prompt is longer than the model's context."""
    CONNECTION = "connection"
    """No connection, or it broke before the reply was complete."""
    TIMEOUT = "timeout"
    """No complete reply within the limit."""
    BAD_REPLY = "bad_reply"
    """A reply that is no chat completion."""
    TOO_LARGE = "too_large"
    """A reply above the size limit; it was not read to its end."""
    CLIENT = "client"
    """The API object raised something of its own."""


class ApiError(RuntimeError):
    """A request to the model endpoint failed for good.

    Args:
        message: One line, with the provider's own words where there are any.
        kind: The class of the failure.
        status: HTTP status, `None` where there was no reply.
        retryable: Whether the same request may well succeed later.
        retry_after_s: Seconds the server asked to wait.

    Attributes:
        attempts: How many times the request was sent.
    """

    kind: ApiErrorKind = ApiErrorKind.CLIENT
    retryable: bool = False

    def __init__(
        self,
        message: str = "",
        *,
        kind: ApiErrorKind | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind
        if retryable is not None:
            self.retryable = retryable
        self.status = status
        self.retry_after_s = retry_after_s
        self.attempts = 1


class ApiStatusError(ApiError):
    """The server refused the request, or failed on it."""

    kind = ApiErrorKind.REFUSED


class ContextLengthError(ApiStatusError):
    """The prompt (with the tokens asked for) does not fit the model's context."""

    kind = ApiErrorKind.CONTEXT_LENGTH


class ApiConnectionError(ApiError, ConnectionError):
    """No connection, or it broke before the reply was complete."""

    kind = ApiErrorKind.CONNECTION
    retryable = True


class ApiTimeoutError(ApiError, TimeoutError):
    """No complete reply within the limit."""

    kind = ApiErrorKind.TIMEOUT
    retryable = True


class ApiReplyError(ApiError, ValueError):
    """The reply is no chat completion, or larger than allowed."""

    kind = ApiErrorKind.BAD_REPLY
