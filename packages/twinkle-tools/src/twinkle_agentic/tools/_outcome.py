"""What became of one tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from twinkle_agentic._aio.threads import BlockingCallError
from twinkle_agentic.tools.text import MAX_TEXT_CHARS, to_text

__all__ = ["ToolErrorKind", "ToolOutcome", "describe_error", "refused", "what_was_raised"]

ToolErrorKind = Literal["bad_call", "unknown_tool", "invalid_arguments", "tool", "timeout"]
"""Why a call failed: not a call at all, no such tool, arguments refused, the tool raised, no answer
in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What became of one tool call.

    Attributes:
        text: What the model sees: the result, or `Error: ...`.
        tool_name: The name called, `None` where the call had none.
        error: The error without its prefix; `None` on success.
        error_kind: Its class; `None` on success.
        value: What the tool returned (the `StepResult` of an `EnvTool`), or what its
            `abandon` returned where the call was given up; else `None`.
    """

    text: str
    tool_name: str | None = None
    error: str | None = None
    error_kind: ToolErrorKind | None = None
    value: Any = None


def refused(
    kind: ToolErrorKind,
    name: str | None,
    message: str,
    *,
    max_chars: int | None = MAX_TEXT_CHARS,
    value: Any = None,
) -> ToolOutcome:
    """Make the outcome of a failed call, its text and its error both cut and clean."""
    error = to_text(message, max_chars=max_chars)
    return ToolOutcome(
        text=f"Error: {error}", tool_name=name, error=error, error_kind=kind, value=value
    )


def what_was_raised(error: BaseException) -> BaseException:
    """Return what a call in a thread raised, where `error` only stands for that, else `error`."""
    if isinstance(error, BlockingCallError) and error.__cause__ is not None:
        return error.__cause__
    return error


def describe_error(error: BaseException) -> str:
    """Return `Type: message` of what a tool raised, in a thread or not; never raises.

    Where there is no message, the type alone.
    """
    error = what_was_raised(error)
    text = to_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
