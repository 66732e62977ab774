"""The JSON values of requests, checked, and times as answers have them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from sandbox_server.errors import ApiError

__all__ = ["as_count", "as_list", "as_object", "as_text", "as_texts", "as_whole", "time_text"]


def as_object(value: object, name: str) -> dict[str, Any]:
    """Return a JSON object; a missing one is empty.

    Raises:
        ApiError: It is something else (400).
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{name} must be an object: got {value!r}")
    return cast("dict[str, Any]", value)


def as_count(value: object, name: str) -> int | None:
    """Return a positive whole number; a missing one is `None`.

    Raises:
        ApiError: It is something else (400).
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ApiError(400, f"{name} must be a positive whole number: got {value!r}")
    return value


def as_whole(value: object, name: str) -> int:
    """Return a whole number; the JSON of protocol buffers may have it as text.

    Raises:
        ApiError: It is something else (400).
    """
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{name} must be a whole number: got {value!r}")
    return value


def as_list(value: object, name: str) -> list[Any]:
    """Return a JSON array; a missing one is empty.

    Raises:
        ApiError: It is something else (400).
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError(400, f"{name} must be an array: got {value!r}")
    return cast("list[Any]", value)


def as_text(value: object, name: str) -> str:
    """Return a JSON string.

    Raises:
        ApiError: It is something else (400).
    """
    if not isinstance(value, str):
        raise ApiError(400, f"{name} must be text: got {value!r}")
    return value


def as_texts(value: object, name: str, limit: int = 1 << 20) -> dict[str, str]:
    """Return a JSON object whose values are text.

    Raises:
        ApiError: It is something else, or longer than `limit` characters (400).
    """
    texts = {key: as_text(text, f"{name}[{key!r}]") for key, text in as_object(value, name).items()}
    if sum(len(key) + len(text) for key, text in texts.items()) > limit:
        raise ApiError(400, f"{name} is longer than {limit} characters")
    return texts


def time_text(seconds: float) -> str:
    """Return a time (as `time.time` has it) in UTC: `2026-01-31T12:00:00.5Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
