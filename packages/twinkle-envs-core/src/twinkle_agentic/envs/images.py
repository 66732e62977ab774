"""Images that an environment puts into its observations: as pixels, or as base64 text."""

from __future__ import annotations

import base64
import binascii
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, cast

__all__ = ["encode_png", "image_from_base64", "image_from_pixels"]

_COLOURS = {1: 0, 3: 2, 4: 6}  # number of channels: colour type of PNG (grey, RGB, RGBA)
_MIN_SIDE = 16  # an array with a shorter side is a board or data
_MAX_SIDE = 4096
_MIN_BASE64_CHARS = 256
# PNG, JPEG, GIF and WebP in base64, as a data URL or bare.
_BASE64 = re.compile(
    r"(?:data:image/[\w.+-]+;base64,)?((?:iVBORw0KGgo|/9j/|R0lGOD|UklGR)[A-Za-z0-9+/\r\n]*+={0,2})\s*"
)


def encode_png(pixels: bytes, *, width: int, height: int, channels: int) -> bytes:
    """Make a PNG.

    Args:
        pixels: `width * height * channels` bytes, row by row from the top.
        width: In pixels.
        height: In pixels.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA).

    Raises:
        ValueError: The sizes do not fit together.
    """
    row = width * channels
    if channels not in _COLOURS or min(width, height) < 1 or len(pixels) != row * height:
        raise ValueError(
            f"{len(pixels)} bytes are no image of {width} x {height} pixels and {channels} channels"
        )
    rows = b"".join(b"\0" + pixels[i : i + row] for i in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def image_from_pixels(value: Any, shape: Any = None) -> tuple[bytes, int, int] | None:
    """Return a PNG of an array of pixels with its width and height, `None` of any other array.

    Args:
        value: Nested lists, height x width x channels, of whole numbers from 0 to 255; or a flat
            list of them.
        shape: Of a flat list: (height, width) or (height, width, channels).
    """
    if not isinstance(value, list):
        return None
    if shape is None:
        shape = _shape_of(cast("list[Any]", value))
        if len(shape) != 3:  # rows of numbers may well be a map
            return None
    if not isinstance(shape, (list, tuple)):
        return None
    sides = cast("Sequence[Any]", shape)
    if len(sides) not in (2, 3) or not all(type(side) is int for side in sides):
        return None
    height, width, channels = (*sides, 1)[:3]
    fits = all(_MIN_SIDE <= side <= _MAX_SIDE for side in (height, width))
    if not fits or channels not in _COLOURS:
        return None
    numbers = cast("list[Any]", value)
    while numbers and isinstance(numbers[0], list):
        if not all(isinstance(inner, list) for inner in numbers):
            return None
        numbers = [item for inner in numbers for item in inner]
    if len(numbers) != height * width * channels:
        return None
    try:
        pixels = bytes(numbers)
    except (TypeError, ValueError):  # fractions, or numbers outside of a byte
        return None
    return encode_png(pixels, width=width, height=height, channels=channels), width, height


def image_from_base64(text: str) -> bytes | None:
    """Return the bytes of an image in base64, empty where they cannot be read; `None` of a text."""
    match = _BASE64.fullmatch(text) if len(text) >= _MIN_BASE64_CHARS else None
    if match is None:
        return None
    try:
        return base64.b64decode(match[1])
    except (binascii.Error, ValueError):
        return b""


def _shape_of(value: list[Any]) -> tuple[int, ...]:
    shape: list[int] = []
    current: Any = value
    while isinstance(current, list) and len(shape) < 4:
        inner = cast("list[Any]", current)
        shape.append(len(inner))
        current = inner[0] if inner else None
    return tuple(shape)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
