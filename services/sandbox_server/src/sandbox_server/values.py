"""The JSON values of requests, checked, and times as answers have them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, cast

from sandbox_server.errors import ApiError

__all__ = [
    "as_count",
    "as_environment",
    "as_list",
    "as_object",
    "as_text",
    "as_texts",
    "as_whole",
    "parse_object",
    "time_text",
]


def parse_object(body: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object that a body is; an empty body is `{}`.

    Raises:
        ApiError: It is something else (400).
    """
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        raise ApiError(400, f"{name} is not JSON: {error}") from error
    return as_object(value, name)


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
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ApiError(400, f"{name} holds half a character: got {value!r}")
    return value


def as_texts(value: object, name: str, limit: int = 1 << 20) -> dict[str, str]:
    """Return a JSON object whose values are text.

    Raises:
        ApiError: It is something else, or longer than `limit` characters (400).
    """
    texts = {
        as_text(key, f"a key of {name}"): as_text(text, f"{name}[{key!r}]")
        for key, text in as_object(value, name).items()
    }
    if sum(len(key) + len(text) for key, text in texts.items()) > limit:
        raise ApiError(400, f"{name} is longer than {limit} characters")
    return texts


def as_environment(value: object, name: str) -> dict[str, str]:
    """Return environment variables.

    Raises:
        ApiError: They are none, or no program can have one of them (400).
    """
    variables = as_texts(value, name)
    for variable, text in variables.items():
        if not variable or "=" in variable or "\0" in variable + text:
            raise ApiError(400, f"{name}: environment variable {variable!r} is not possible")
    return variables


def time_text(seconds: float) -> str:
    """Return a time (as `time.time` has it) in UTC: `2026-01-31T12:00:00.5Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
