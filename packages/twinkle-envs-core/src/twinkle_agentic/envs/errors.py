"""What can go wrong between a trainer and its environments.

```
TwinkleEnvError                        kind, retryable
├── EnvError (RuntimeError)            the environment itself failed
├── EnvTimeoutError (TimeoutError)     no answer within the limit
├── SessionClosedError (ConnectionError)   the server-side episode is gone
├── CapacityError (ConnectionError)    the server is full
├── SandboxError (RuntimeError)
│   ├── SandboxUnavailableError        none could be started
│   └── SandboxLostError               it was there and is gone
└── PoolError (RuntimeError)           no such slot free, pool closed
    └── WorkerLostError                the process that held the slot died
```

Infrastructure fails with one of these; what the agent's own action did wrong is an observation.
Each also is the standard-library type it refines, and each pickles.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "CapacityError",
    "EnvError",
    "EnvTimeoutError",
    "ErrorKind",
    "PoolError",
    "SandboxError",
    "SandboxLostError",
    "SandboxUnavailableError",
    "SessionClosedError",
    "TwinkleEnvError",
    "WorkerLostError",
]


class ErrorKind(StrEnum):
    """The value of `info["error_kind"]`."""

    TOOL = "tool"
    """The action failed; the episode lives."""
    ENV = "env"
    """The environment raised, or the process it lived in died."""
    TIMEOUT = "timeout"
    """No answer within the limit; the state of the episode is unknown."""
    SESSION_LOST = "session_lost"
    """The connection to the server broke, and the server-side episode with it."""
    SANDBOX_LOST = "sandbox_lost"
    """The sandbox is gone."""
    CAPACITY = "capacity"
    """The server or pool had no room within the time allowed."""


class TwinkleEnvError(Exception):
    """Base of all errors here.

    Args:
        message: One line: what was asked, what was found, what to do.
        retryable: Whether a new episode may well succeed; by default what is usual for the class.

    Attributes:
        kind: The class of the failure, as in `info["error_kind"]`.
        retryable: Whether a new episode may well succeed.
    """

    kind: ErrorKind = ErrorKind.ENV
    retryable: bool = False

    def __init__(self, message: str = "", *, retryable: bool | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable


class EnvError(TwinkleEnvError, RuntimeError):
    """The environment raised, or gave something that is no result."""


class EnvTimeoutError(TwinkleEnvError, TimeoutError):
    """No answer within the limit; whatever was running is in an unknown state."""

    kind = ErrorKind.TIMEOUT
    retryable = True


class SessionClosedError(TwinkleEnvError, ConnectionError):
    """The session is over: call `reset` for a new episode."""

    kind = ErrorKind.SESSION_LOST
    retryable = True


class CapacityError(TwinkleEnvError, ConnectionError):
    """The server stayed full for the time allowed."""

    kind = ErrorKind.CAPACITY
    retryable = True


class SandboxError(TwinkleEnvError, RuntimeError):
    """Something about a sandbox."""


class SandboxUnavailableError(SandboxError):
    """No sandbox could be started."""

    kind = ErrorKind.CAPACITY
    retryable = True


class SandboxLostError(SandboxError):
    """The sandbox was there and is gone."""

    kind = ErrorKind.SANDBOX_LOST
    retryable = True


class PoolError(TwinkleEnvError, RuntimeError):
    """The pool cannot serve the request."""


class WorkerLostError(PoolError):
    """The process that held the slot died; `reset` revives the slot."""

    retryable = True
