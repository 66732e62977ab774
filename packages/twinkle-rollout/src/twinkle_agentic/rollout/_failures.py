"""What an exception of a model endpoint or an env says about a trajectory."""

from __future__ import annotations

from typing import Any

from twinkle_agentic.envs.errors import TwinkleEnvError
from twinkle_agentic.protocol._reply import error_of
from twinkle_agentic.protocol.errors import ApiError
from twinkle_agentic.rollout.types import Failure
from twinkle_agentic.tools._outcome import describe_error
from twinkle_agentic.tools.text import to_text

__all__ = ["failure_of"]


def failure_of(error: BaseException, *, default: str = "client") -> Failure:
    """Classify an exception of an API object or an env; `default` is the kind of any other."""
    text = describe_error(error)
    if isinstance(error, ApiError):
        return Failure(text, error.kind.value, error.retryable)
    if isinstance(error, TwinkleEnvError):
        return Failure(text, str(error.kind), error.retryable)
    status: Any = getattr(error, "status_code", None)
    if isinstance(status, int):  # the exceptions of the openai package and its like
        words = error_of(status, {}, to_text(error).encode())
        return Failure(text, words.kind.value, words.retryable)
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return Failure(text, "timeout", True)
    if isinstance(error, ConnectionError) or "Connection" in type(error).__name__:
        return Failure(text, "connection", True)
    return Failure(text, default, False)
