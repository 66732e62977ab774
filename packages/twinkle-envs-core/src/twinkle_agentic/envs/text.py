"""Observations as text: a mapping of fields becomes lines that a model can read."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from twinkle_agentic.envs.images import image_from_base64, image_from_pixels
from twinkle_agentic.tools.text import clean_text, to_jsonable

__all__ = ["is_grid", "is_unshown_data", "render_command_output", "render_fields"]

_MAX_NUMBERS = 64  # a flat list of more is data, not something a model reads
_MAX_GRID_SIDE = 64
_MAX_CELL_CHARS = 12


def render_fields(
    fields: Mapping[str, Any],
    *,
    skip: Collection[str] = (),
    name_all: bool = False,
    images: list[bytes] | None = None,
) -> str:
    """Render the fields of an observation, one `name: value` a line.

    A single text field is the text itself. Empty fields (`None`, empty text, list or object) are
    left out. Rectangles of short values are drawn as rows; longer arrays of numbers are summarised.

    Args:
        fields: JSON values and what `to_jsonable` takes.
        skip: Names to leave out.
        name_all: Name a single text field too.
        images: Takes the images that were found, as PNG or JPEG, and the text names them: pixels
            (height x width x channels, or a flat list beside its `<name>_shape`), and base64.
            Without it, and for other formats, their size stands in the text.
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
            return clean_text(_shown(only, images))
    lines: list[str] = []
    drawn: set[str] = set()  # shapes that the image itself has
    for name, value in shown.items():
        if name in drawn:
            continue
        text = None
        if images is not None and isinstance(value, list):
            text = _pictured(value, shown.get(f"{name}_shape"), images)
            if text is not None:
                drawn.add(f"{name}_shape")
        if text is None:
            text = _render(value, shown, images)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return clean_text("\n".join(lines))


def is_grid(value: Any) -> bool:
    """Whether a list is drawn as the rows of a board: a rectangle of short values."""
    return isinstance(value, list) and _as_grid(cast("list[Any]", value), {}) is not None


def is_unshown_data(value: Any) -> bool:
    """Whether a list is neither a board nor an image, but more numbers than are shown."""
    value = to_jsonable(value) if isinstance(value, (list, tuple)) else value
    if not isinstance(value, list) or is_grid(value):
        return False
    return _summary(cast("list[Any]", value)) is not None and image_from_pixels(value) is None


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


def _render(value: Any, siblings: Mapping[str, Any], images: list[bytes] | None) -> str:
    if isinstance(value, str):
        return _shown(value, images)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        grid = _as_grid(items, siblings)
        if grid is not None:
            return "\n".join(" ".join(row) for row in grid)
        if (summary := _summary(items)) is not None:
            return summary
        if all(isinstance(item, str) for item in items):
            texts = [_shown(item, images) for item in items]
            return ", ".join(texts) if not any("\n" in text for text in texts) else "\n".join(texts)
    return json.dumps(_shorten(value, images), ensure_ascii=False)


def _shorten(value: Any, images: list[bytes] | None) -> Any:
    """Summarise arrays of numbers, and images, inside an object or a list."""
    if isinstance(value, str):
        return _shown(value, images)
    if isinstance(value, dict):
        return {key: _shorten(item, images) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if images is not None and (text := _pictured(items, None, images)) is not None:
            return text
        if (summary := _summary(items)) is not None:
            return summary
        return [_shorten(item, images) for item in items]
    return value


def _pictured(value: Any, shape: Any, images: list[bytes]) -> str | None:
    """Return what stands for an array of pixels, which goes to the images."""
    found = image_from_pixels(value, shape)
    if found is None:
        return None
    png, width, height = found
    images.append(png)
    return f"[image {len(images)}: {width} x {height} pixels]"


def _summary(items: list[Any]) -> str | None:
    """Return what stands for a long array of numbers; `None` for any other list."""
    shape, numbers = _shape(items)
    if not numbers or _count(items) <= _MAX_NUMBERS:
        return None
    return f"[{' x '.join(map(str, shape))} numbers not shown]"


def _shown(text: str, images: list[bytes] | None) -> str:
    """Return a text, or what stands for it where it is an image in base64."""
    data = image_from_base64(text)
    if data is None:
        return text
    if images is None or not data.startswith((b"\x89PNG", b"\xff\xd8\xff")):
        return f"[image of {len(text) * 3 // 4 // 1000} kB not shown]"
    images.append(data)
    return f"[image {len(images)}: {len(data) // 1000} kB]"


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
