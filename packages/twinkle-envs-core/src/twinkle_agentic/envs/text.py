"""Observations as text: a mapping of fields becomes lines that a model can read."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.tools.text import (
    MAX_TEXT_CHARS,
    clean_text,
    to_jsonable,
    to_text,
    truncate_middle,
)

__all__ = [
    "MAX_TEXT_CHARS",
    "clean_text",
    "render_command_output",
    "render_fields",
    "to_jsonable",
    "to_text",
    "truncate_middle",
]

_MAX_NUMBERS = 64  # a flat list of more is data, not something a model reads
_MAX_GRID_SIDE = 64
_MAX_CELL_CHARS = 12
_MIN_IMAGE_CHARS = 256
# PNG, JPEG, GIF and WebP in base64, as a data URL or bare.
_IMAGE = re.compile(
    r"(?:data:image/[\w.+-]+;base64,)?(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/\r\n]*+={0,2}\s*"
)


def render_fields(
    fields: Mapping[str, Any], *, skip: Collection[str] = (), hint: str = "", name_all: bool = False
) -> str:
    """Render the fields of an observation, one `name: value` a line.

    A single text field is the text itself. Empty fields (`None`, empty text, list or object) are
    left out. Rectangles of short values are drawn as rows; longer arrays of numbers, and images in
    base64, are summarised.

    Args:
        fields: JSON values and what `to_jsonable` takes.
        skip: Names to leave out.
        hint: Added where an array or an image was summarised: what to do to see it.
        name_all: Name a single text field too.
    """
    shown: dict[str, Any] = {}
    for name, raw in fields.items():
        if name in skip:
            continue
        value = to_jsonable(raw)
        if value is not None and value != "" and value != [] and value != {}:
            shown[str(name)] = value
    if len(shown) == 1 and not name_all:
        only = next(iter(shown.values()))
        if isinstance(only, str):
            return clean_text(_shown(only, hint))
    lines: list[str] = []
    for name, value in shown.items():
        text = _render(value, shown, hint)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return clean_text("\n".join(lines))


def render_command_output(stdout: str, stderr: str = "", exit_code: int | None = 0) -> str:
    """Render what a program printed: `print(1 + 1)` is `2`.

    Args:
        stdout: Trailing newlines are stripped.
        stderr: Follows as a marked part, if there is any.
        exit_code: Follows as a marked part unless it is 0; `None` is unknown and not shown.
    """
    parts: list[str] = []
    if body := stdout.rstrip("\r\n"):
        parts.append(body)
    if complaint := stderr.rstrip():
        parts.append(f"[stderr]\n{complaint}")
    if exit_code:
        parts.append(f"[exit code {exit_code}]")
    return clean_text("\n".join(parts))


def _render(value: Any, siblings: Mapping[str, Any], hint: str) -> str:
    if isinstance(value, str):
        return _shown(value, hint)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        grid = _as_grid(items, siblings)
        if grid is not None:
            return "\n".join(" ".join(row) for row in grid)
        if (summary := _summary(items, hint)) is not None:
            return summary
        if all(isinstance(item, str) for item in items):
            texts = [_shown(item, hint) for item in items]
            return ", ".join(texts) if not any("\n" in text for text in texts) else "\n".join(texts)
    return json.dumps(_shorten(value, hint), ensure_ascii=False)


def _shorten(value: Any, hint: str) -> Any:
    """Summarise arrays of numbers, and images, inside an object or a list."""
    if isinstance(value, str):
        return _shown(value, hint)
    if isinstance(value, dict):
        return {key: _shorten(item, hint) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if (summary := _summary(items, hint)) is not None:
            return summary
        return [_shorten(item, hint) for item in items]
    return value


def _summary(items: list[Any], hint: str) -> str | None:
    """Return what stands for a long array of numbers; `None` for any other list."""
    shape, numbers = _shape(items)
    if not numbers or _count(items) <= _MAX_NUMBERS:
        return None
    return _not_shown(f"{' x '.join(map(str, shape))} numbers", hint)


def _shown(text: str, hint: str) -> str:
    """Return a text, or what stands for it where it is an image in base64."""
    if len(text) < _MIN_IMAGE_CHARS or not _IMAGE.fullmatch(text):
        return text
    return _not_shown(f"image of {len(text) * 3 // 4 // 1000} kB", hint)


def _not_shown(what: str, hint: str) -> str:
    return f"[{what} not shown{f'; {hint}' if hint else ''}]"


def _as_grid(items: list[Any], siblings: Mapping[str, Any]) -> list[list[str]] | None:
    """Return the cells of a rectangle: rows, or a flat list beside its `width` and `height`."""
    width, height = siblings.get("width"), siblings.get("height")
    if (
        isinstance(width, int)
        and isinstance(height, int)
        and len(items) == width * height > 1
        and not isinstance(items[0], (list, dict))
    ):
        items = [items[i : i + width] for i in range(0, len(items), width)]
    rows = [cast("list[Any]", row) for row in items if isinstance(row, list)]
    if len(rows) != len(items) or len(rows) < 2 or len(rows) > _MAX_GRID_SIDE:
        return None
    side = len(rows[0])
    if not 1 <= side <= _MAX_GRID_SIDE or any(len(row) != side for row in rows):
        return None
    cells: list[list[str]] = []
    for row in rows:
        if any(isinstance(cell, (list, dict)) for cell in row):
            return None
        texts = [cell if isinstance(cell, str) else json.dumps(cell) for cell in row]
        if any(len(text) > _MAX_CELL_CHARS or "\n" in text for text in texts):
            return None
        cells.append(texts)
    widest = max(len(text) for row in cells for text in row)
    return [[text.rjust(widest) for text in row] for row in cells]


def _shape(items: Sequence[Any]) -> tuple[tuple[int, ...], bool]:
    """Return the lengths along the first elements, and whether the innermost values are numbers."""
    shape: list[int] = []
    current: Any = items
    while isinstance(current, list):
        inner = cast("list[Any]", current)
        shape.append(len(inner))
        if not inner:
            return tuple(shape), False
        current = inner[0]
    return tuple(shape), isinstance(current, (int, float)) and not isinstance(current, bool)


def _count(value: Any) -> int:
    """Count the innermost values of nested lists."""
    if isinstance(value, list):
        return sum(map(_count, cast("list[Any]", value)))
    return 1
