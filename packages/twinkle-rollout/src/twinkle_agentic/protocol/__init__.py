"""Clients of model endpoints. The names below are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_agentic.protocol._reply import Completion
    from twinkle_agentic.protocol.base import API
    from twinkle_agentic.protocol.errors import (
        ApiConnectionError,
        ApiError,
        ApiErrorKind,
        ApiReplyError,
        ApiStatusError,
        ApiTimeoutError,
        ContextLengthError,
    )
    from twinkle_agentic.protocol.openai import OpenAI
    from twinkle_agentic.protocol.retry import RetryPolicy
    from twinkle_agentic.protocol.sampling import SamplingParams

__all__ = [
    "API",
    "ApiConnectionError",
    "ApiError",
    "ApiErrorKind",
    "ApiReplyError",
    "ApiStatusError",
    "ApiTimeoutError",
    "Completion",
    "ContextLengthError",
    "OpenAI",
    "RetryPolicy",
    "SamplingParams",
]

_MODULES = {
    "API": "base",
    "Completion": "_reply",
    "OpenAI": "openai",
    "RetryPolicy": "retry",
    "SamplingParams": "sampling",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
