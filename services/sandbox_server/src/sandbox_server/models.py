"""What the JSON of requests has in common: how it is checked, and types that several use."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.alias_generators import to_camel

_MAX_ENVIRONMENT_CHARS = 1 << 20


class Message(BaseModel):
    """The JSON object of a request: camelCase names, `null` means absent, others are ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        return {name: field for name, field in fields.items() if field is not None}


def limited_texts(texts: dict[str, str], limit: int) -> dict[str, str]:
    """Return a mapping of text whose keys and values have at most `limit` characters in all."""
    if sum(len(key) + len(text) for key, text in texts.items()) > limit:
        raise ValueError(f"is longer than {limit} characters")
    return texts


def _environment(variables: dict[str, str]) -> dict[str, str]:
    for name, text in variables.items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(f"environment variable {name!r} is not possible")
    return limited_texts(variables, _MAX_ENVIRONMENT_CHARS)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def _encodable(text: str) -> str:
    text.encode()  # half a character, which JSON can write and UTF-8 cannot, is a ValueError
    return text


Text = Annotated[str, AfterValidator(_encodable)]
"""Text that a program or a file name can have."""
Environment = Annotated[dict[Text, Text], AfterValidator(_environment)]
"""Environment variables that a program can have."""
Whole = Annotated[int, BeforeValidator(_no_bool)]
"""A whole number; the JSON of protocol buffers may have it as text."""


def time_text(seconds: float) -> str:
    """Return a time (as `time.time` has it) in UTC: `2026-01-31T12:00:00.5Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
