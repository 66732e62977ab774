"""Text that a model can read: any value as a string, of bounded length, safe to encode."""

from __future__ import annotations

import enum
import json
import math
from collections import UserList, deque
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, cast

from typing_extensions import Buffer

__all__ = ["MAX_TEXT_CHARS", "clean_text", "to_jsonable", "to_text", "truncate_middle"]

MAX_TEXT_CHARS = 32_768
"""Characters kept of one observation or tool result, unless the caller says otherwise."""

_MAX_DEPTH = 100  # levels of nesting that are converted; the stack ends near 1,000

_ARRAYS = (list, tuple, set, frozenset, deque, UserList, KeysView, ValuesView, ItemsView)


def to_text(value: object, *, max_chars: int | None = MAX_TEXT_CHARS) -> str:
    """Render the result of a tool for a model.

    Args:
        value: `None` becomes the empty string, a string stays. Mappings, lists, tuples, sets, numpy
            arrays, pydantic models and dataclasses that do not say how they print become JSON
            (`to_jsonable`; non-ASCII kept). Bytes are decoded as UTF-8. All else is `str(value)`.
        max_chars: Characters kept, head and tail; `None` keeps all.

    Returns:
        Text without lone surrogates. Never raises: a value that cannot be printed is named.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        text = value if type(value) is str else str.__str__(value)
    elif isinstance(value, (dict, list, tuple)):
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except Exception:  # something JSON does not know
            text = _json_text(cast("object", value))
    elif isinstance(value, (bytes, bytearray, memoryview)):
        text = _decoded(cast("Buffer", value))
    else:
        try:
            text = _json_text(value) if _is_structured(value) else _printed(value)
        except Exception:  # of its own methods
            text = _printed(value)
    if max_chars is not None:
        text = truncate_middle(text, max_chars)
    return clean_text(text)


def truncate_middle(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Keep the head and the tail of a long text and say how much is missing.

    Args:
        text: Any text.
        max_chars: Characters of `text` that are kept (>= 1); the line that tells of the cut comes
            on top.

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
    """Replace lone surrogates, which no JSON or UTF-8 encoder accepts, by U+FFFD.

    The two halves of a character that arrived apart become that character.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def to_jsonable(value: Any) -> Any:
    """Convert a value to what JSON can hold, losing nothing that JSON can say.

    Dataclasses, pydantic models, numpy scalars and arrays, enums, sets and bytes are converted; NaN
    and the infinities become the strings `"NaN"`, `"Infinity"`, `"-Infinity"` (JSON has no such
    numbers). A container inside itself becomes `"<cycle>"`, what lies more than 100 levels deep
    `"<nested too deeply>"`, and whatever is left its `str`. Never raises.
    """
    return _convert(value, ())


def _convert(value: Any, path: tuple[int, ...]) -> Any:
    """Convert one value; `path` holds the ids of the containers around it."""
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, enum.Enum):
        return _convert(value.value, path)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decoded(cast("Buffer", value))
    if isinstance(value, type):
        return _printed(value)  # pyright: ignore[reportUnknownArgumentType]
    if id(value) in path:
        return "<cycle>"
    if len(path) >= _MAX_DEPTH:
        return "<nested too deeply>"
    try:
        return _convert_inside(value, (*path, id(value)))
    except Exception:  # of its own methods
        return _printed(value)


def _convert_inside(value: Any, path: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return _convert_mapping(cast("Mapping[Any, Any]", value), path)
    if isinstance(value, _ARRAYS):
        return [_convert(item, path) for item in cast("Iterable[Any]", value)]
    for converted in _conversions(value):
        return _convert(converted, path)
    return _printed(value)


def _convert_mapping(value: Mapping[Any, Any], path: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if type(key) is str else _key(key)
        # Two keys may be one text (1 and "1"): neither value is lost.
        result[name if name not in result else repr(key)] = _convert(item, path)
    return result


def _key(key: object) -> str:
    """Name a key as JSON does: `null`, `true`, `1`, `2.5`."""
    if isinstance(key, (tuple, frozenset)):
        return _printed(cast("object", key))
    plain = _convert(key, ())
    return plain if isinstance(plain, str) else json.dumps(plain)


def _conversions(value: Any) -> Iterable[Any]:
    """Yield the plain forms an object offers, the best one first."""
    for method, options in (
        ("model_dump", {"mode": "json"}),
        ("model_dump", {}),
        ("tolist", {}),
        ("_asdict", {}),
    ):
        try:
            yield getattr(value, method)(**options)
        except Exception:  # not offered, or not for this value
            continue
    fields = getattr(value, "__dataclass_fields__", None)
    if isinstance(fields, dict):
        yield {name: getattr(value, name, None) for name in cast("dict[str, Any]", fields)}


def _is_structured(value: object) -> bool:
    if isinstance(value, (Mapping, _ARRAYS)):  # pyright: ignore[reportArgumentType]
        return True
    if isinstance(value, type):
        return False
    if callable(getattr(value, "model_dump", None)):
        return True
    if callable(getattr(value, "tolist", None)):
        return bool(getattr(value, "ndim", 0))
    return hasattr(value, "__dataclass_fields__") and type(value).__str__ is object.__str__


def _json_text(value: object) -> str:
    return json.dumps(to_jsonable(value), ensure_ascii=False)


def _decoded(value: Buffer) -> str:
    return bytes(value).decode("utf-8", "replace")


def _integer(value: int) -> int | str:
    # The limit on the digits of a printed integer (sys.set_int_max_str_digits) starts at 640.
    return int(value) if value.bit_length() < 2_000 else _printed(value)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _printed(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"
