# The data of the tests is free-form JSON.
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest

from twinkle_agentic.envs import images
from twinkle_agentic.envs.images import encode_png, image_from_base64, image_from_pixels
from twinkle_agentic.envs.text import render_fields


def decoded(png: bytes) -> tuple[int, int, int, bytes]:
    """Read a PNG whose rows are not filtered; its checksums are checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    parts: dict[bytes, bytes] = {}
    at = 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + data) == int.from_bytes(png[at + 8 + size : at + 12 + size], "big")
        parts[kind] = data
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert depth == 8
    rows = zlib.decompress(parts[b"IDAT"])
    step = len(rows) // height
    return (
        width,
        height,
        colour,
        b"".join(rows[y * step + 1 : (y + 1) * step] for y in range(height)),
    )


def test_public_names() -> None:
    assert [name for name in images.__all__ if not hasattr(images, name)] == []


@pytest.mark.parametrize(("channels", "colour"), [(1, 0), (3, 2), (4, 6)])
def test_png_has_the_pixels(channels: int, colour: int) -> None:
    pixels = bytes(i % 256 for i in range(20 * 30 * channels))
    png = encode_png(pixels, width=20, height=30, channels=channels)
    assert decoded(png) == (20, 30, colour, pixels)


def test_sizes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ValueError, match="11 bytes are no image of 2 x 2 pixels and 3 channels"):
        encode_png(bytes(11), width=2, height=2, channels=3)


def test_flat_pixels_beside_their_shape_become_an_image() -> None:
    found: list[bytes] = []
    screen = [i % 251 for i in range(210 * 160 * 3)]
    fields = {"screen": screen, "screen_shape": [210, 160, 3], "lives": 3}
    assert render_fields(fields, images=found) == "screen: [image 1: 160 x 210 pixels]\nlives: 3"
    assert decoded(found[0]) == (160, 210, 2, bytes(screen))


def test_nested_pixels_and_base64_become_images_in_order() -> None:
    found: list[bytes] = []
    png = encode_png(bytes(64 * 64 * 3), width=64, height=64, channels=3) + b"x" * 400
    jpeg = b"\xff\xd8\xff" + b"y" * 3_000
    fields = {
        "first": [[[1, 2, 3]] * 20] * 17,
        "second": "data:image/jpeg;base64," + base64.b64encode(jpeg).decode(),
        "more": {"third": base64.b64encode(png).decode(), "fourth": [[[4, 5, 6, 7]] * 16] * 16},
    }
    text = render_fields(fields, images=found)
    assert text.startswith("first: [image 1: 20 x 17 pixels]\nsecond: [image 2: 3 kB]\nmore: {")
    assert "[image 3: 0 kB]" in text and "[image 4: 16 x 16 pixels]" in text
    assert found[1:3] == [jpeg, png]
    assert [decoded(found[0])[:3], decoded(found[3])[:3]] == [(20, 17, 2), (16, 16, 6)]


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ([0] * 128, [128]),
        ([0] * 64, [8, 8]),
        ([0.5] * 400, [20, 20]),
        ([256] * 400, [20, 20]),
        ([-1] * 400, [20, 20]),
        ([0] * 399, [20, 20]),
        ([0] * 800, [20, 20, 2]),
        ([0] * 400, "20 x 20"),
        ([0] * 400, [20, 20.0]),
        ([[0] * 20] * 20, None),
        ([[[0] * 8] * 20] * 20, None),
        ([[[0, 0, 0]] * 20] * 19 + [[0]], None),
        ([[[0, 0, 0]] * 20] * 19 + [7], None),
        ({"a": 1}, None),
    ],
)
def test_other_arrays_are_no_images(value: Any, shape: Any) -> None:
    assert image_from_pixels(value, shape) is None


def test_other_formats_are_named_by_their_size() -> None:
    found: list[bytes] = []
    gif = base64.b64encode(b"GIF89a" + b"x" * 3_000).decode()
    assert render_fields({"view": gif}, images=found) == "[image of 3 kB not shown]"
    assert found == []
    assert image_from_base64("iVBORw0KGgo" + "A" * 5_002) == b""
    assert image_from_base64("short") is None
