"""Frames between the host and the supervisor of a sandbox.

A frame is an 8-byte header (two big-endian uint32: length of the JSON part, length of the body),
the JSON object, and the body: raw bytes, so file contents and program output are never encoded.
Both ends use this module, so it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import struct
from typing import Any, cast

__all__ = ["MAX_BODY_BYTES", "Frame", "FrameBuffer", "FrameError", "Message", "encode"]

MAX_BODY_BYTES = 1 << 20
_MAX_JSON_BYTES = 4 << 20
_HEADER = struct.Struct("!II")

Message = dict[str, Any]
Frame = tuple[Message, bytes]


class FrameError(ValueError):
    """The other end sent something that is not a frame; the connection cannot go on."""


def encode(message: dict[str, Any], body: bytes = b"") -> bytes:
    """Return one frame.

    Args:
        message: The JSON part.
        body: At most `MAX_BODY_BYTES`; split longer data over several frames.

    Raises:
        FrameError: The message or the body is too long.
    """
    text = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(text) > _MAX_JSON_BYTES or len(body) > MAX_BODY_BYTES:
        raise FrameError(f"frame too long: {len(text)} bytes of JSON, {len(body)} bytes of body")
    return _HEADER.pack(len(text), len(body)) + text + body


class FrameBuffer:
    """Cut a byte stream into frames, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes and return the frames that are complete now.

        Raises:
            FrameError: The header announces more than a frame may hold, or the JSON part is not an
                object.
        """
        self._data += data
        frames: list[Frame] = []
        start = 0
        while len(self._data) - start >= _HEADER.size:
            text_len, body_len = _HEADER.unpack_from(self._data, start)
            if text_len > _MAX_JSON_BYTES or body_len > MAX_BODY_BYTES:
                raise FrameError(f"frame announces {text_len} + {body_len} bytes")
            text_at = start + _HEADER.size
            body_at = text_at + text_len
            end = body_at + body_len
            if len(self._data) < end:
                break
            try:
                message = json.loads(self._data[text_at:body_at])
            except ValueError as error:
                raise FrameError(f"frame is not JSON: {error}") from error
            if not isinstance(message, dict):
                raise FrameError(f"frame is not a JSON object: {type(message).__name__}")
            frames.append((cast("Message", message), bytes(self._data[body_at:end])))
            start = end
        if start:
            del self._data[:start]
        return frames
