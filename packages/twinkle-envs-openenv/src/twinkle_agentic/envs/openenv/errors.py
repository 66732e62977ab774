"""What can go wrong between `OpenEnvClient` and a server, beyond the errors of core."""

from __future__ import annotations

from typing import Any

from twinkle_agentic.envs.errors import CapacityError, EnvError, ErrorKind, TwinkleEnvError

__all__ = ["ActionRefusedError", "ServerError", "ServerFullError"]


class ActionRefusedError(TwinkleEnvError, ValueError):
    """The action never reached the environment: too large, no JSON, or against the action's schema.

    The episode lives on. `errors` holds the field errors of the server's (or the client's)
    validation.
    """

    kind = ErrorKind.TOOL

    def __init__(self, message: str = "", *, errors: list[dict[str, Any]] | None = None) -> None:
        super().__init__(message)
        self.errors = list(errors or [])

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remade_refusal, (str(self), self.errors))


class ServerError(EnvError):
    """The server answered with an error frame.

    Attributes:
        code: The server's code, such as `EXECUTION_ERROR` or `FACTORY_ERROR`.
        session_lives: Whether the session stays usable after it.
    """

    def __init__(
        self,
        message: str = "",
        *,
        code: str = "",
        session_lives: bool = False,
        kind: ErrorKind = ErrorKind.ENV,
    ) -> None:
        super().__init__(message, retryable=kind is ErrorKind.SESSION_LOST)
        self.code = code
        self.session_lives = session_lives
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return (_remade_server_error, (str(self), self.code, self.session_lives, self.kind))


class ServerFullError(CapacityError):
    """The server refused the session because all its sessions are taken."""


def _remade_refusal(message: str, errors: list[dict[str, Any]]) -> ActionRefusedError:
    return ActionRefusedError(message, errors=errors)


def _remade_server_error(
    message: str, code: str, session_lives: bool, kind: ErrorKind
) -> ServerError:
    return ServerError(message, code=code, session_lives=session_lives, kind=kind)
