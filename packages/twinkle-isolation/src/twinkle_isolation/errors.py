"""Errors of the isolation layer.

```
IsolationError (RuntimeError)
├── IsolationUnavailableError      this machine cannot isolate as asked
├── SandboxStartError              one sandbox could not be made
├── SandboxLostError               the sandbox has ended; nothing in it can be reached again
└── GuestError                     a request the sandbox answered with a failure; see `code`
```
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "ErrorCode",
    "GuestError",
    "IsolationError",
    "IsolationUnavailableError",
    "SandboxLostError",
    "SandboxStartError",
]

ErrorCode = Literal[
    "already_exists",
    "deadline_exceeded",
    "failed_precondition",
    "internal",
    "invalid_argument",
    "no_space",
    "not_found",
    "permission_denied",
    "resource_exhausted",
    "unimplemented",
]


class IsolationError(RuntimeError):
    """Base of the errors of this package."""


class IsolationUnavailableError(IsolationError):
    """The isolation that was asked for does not work on this machine; the message says why."""


class SandboxStartError(IsolationError):
    """The sandbox could not be made: no memory, no process, or the zygote has ended."""


class SandboxLostError(IsolationError, ConnectionError):
    """The sandbox has ended (killed, or its supervisor died)."""


class GuestError(IsolationError):
    """The sandbox could not do what was asked; it goes on.

    Attributes:
        code: One of `ErrorCode`.
        message: What was wrong, with the path or name.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.code: ErrorCode = code
        self.message = message

    def __str__(self) -> str:
        return self.message
