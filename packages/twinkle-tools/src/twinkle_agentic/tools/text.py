"""Text that a model can read: any value as a string, of bounded length, safe to encode."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["MAX_TEXT_CHARS", "clean_text", "to_jsonable", "to_text", "truncate_middle"]

MAX_TEXT_CHARS = 32_768
"""Characters kept of one observation or tool result, unless the caller says otherwise."""


def to_text(value: object, *, max_chars: int | None = MAX_TEXT_CHARS) -> str:
    """Render the result of a tool for a model.

    Args:
        value: `None` becomes the empty string, a string stays, dict, list and tuple become JSON (non-ASCII kept,
            numpy scalars and arrays as numbers), all else `str(value)`.
        max_chars: Characters kept, head and tail; `None` keeps all.

    Returns:
        Text without lone surrogates.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        text = value
    elif isinstance(value, (dict, list, tuple)):
        text = json.dumps(to_jsonable(value), ensure_ascii=False)
    else:
        text = str(value)
    text = clean_text(text)
    return text if max_chars is None else truncate_middle(text, max_chars)


def truncate_middle(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Keep the head and the tail of a long text and say how much is missing.

    Args:
        text: Any text.
        max_chars: Characters of `text` that are kept (>= 1); the line that tells of the cut comes on top.

    Returns:
        `text` itself where it is short enough.

    Raises:
        ValueError: `max_chars` is below 1.
    """
    if max_chars < 1:
        raise ValueError(f"max_chars must be at least 1, found {max_chars}")
    cut = len(text) - max_chars
    if cut <= 0:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    end = text[len(text) - tail :] if tail else ""
    return f"{text[:head]}\n[... {cut} of {len(text)} characters cut ...]\n{end}"


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no JSON or UTF-8 encoder accepts, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def to_jsonable(value: Any) -> Any:
    """Convert a value to what JSON can hold, losing nothing that JSON can say.

    Dataclasses, pydantic models, numpy scalars and arrays, sets and bytes are converted; NaN and the
    infinities become the strings `"NaN"`, `"Infinity"`, `"-Infinity"` (JSON has no such numbers);
    whatever is left becomes its `str`.
    """
    if value is None or isinstance(value, (bool, int, str)):
        # A subclass (an enum, numpy's bool) may print as something else; JSON wants the plain value.
        return value if type(value) in (bool, int, str, type(None)) else _plain(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {
            (k if isinstance(k, str) else str(k)): to_jsonable(v)
            for k, v in value.items()  # pyright: ignore[reportUnknownVariableType]
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    for method in ("model_dump", "tolist", "_asdict"):
        convert = getattr(value, method, None)
        if callable(convert) and not isinstance(value, type):
            return to_jsonable(convert())
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None and not isinstance(value, type):
        return {name: to_jsonable(getattr(value, name)) for name in fields}
    return str(value)


def _plain(value: bool | int | str) -> bool | int | str:
    if isinstance(value, str):
        return str.__str__(value)
    return int(value)
