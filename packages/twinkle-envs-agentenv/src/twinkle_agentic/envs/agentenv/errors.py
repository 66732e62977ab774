"""What can go wrong with a sandbox, beside the errors of `twinkle_agentic.envs.errors`.

```
SandboxError
├── SandboxUnavailableError
│   └── SandboxRefusedError     the server will refuse it the next time too
├── SandboxSetupError           a setup command failed
└── CommandBrokenError          the connection broke while a command ran
ToolFaultError (ValueError)     the action was wrong; no fault of the sandbox
```
"""

from __future__ import annotations

from twinkle_agentic.envs.errors import ErrorKind, SandboxError, SandboxUnavailableError

__all__ = ["CommandBrokenError", "SandboxRefusedError", "SandboxSetupError", "ToolFaultError"]


class SandboxRefusedError(SandboxUnavailableError):
    """The server refuses to create the sandbox: wrong key, no such template, a server too old."""

    kind = ErrorKind.ENV
    retryable = False


class SandboxSetupError(SandboxError):
    """A setup command failed; the sandbox has been killed.

    Attributes:
        command: The command.
        exit_code: Its exit code; `None` where it ran into the time limit.
        output: What it printed, head and tail.
    """

    def __init__(
        self,
        message: str = "",
        *,
        command: str = "",
        exit_code: int | None = None,
        output: str = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.command = command
        self.exit_code = exit_code
        self.output = output


class CommandBrokenError(SandboxError):
    """The connection broke while a command ran; the sandbox lives and the command was killed.

    Attributes:
        output: What it had printed until then, rendered for a model.
    """

    retryable = True

    def __init__(
        self, message: str = "", *, output: str = "", retryable: bool | None = None
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.output = output


class ToolFaultError(ValueError):
    """The action was wrong or failed, and the sandbox is well: the model reads the text."""
