from __future__ import annotations

import pytest

from twinkle_isolation._wire import MAX_BODY_BYTES, FrameBuffer, FrameError, encode


def test_frames_survive_any_cut() -> None:
    frames = [({"id": 1, "text": "ü"}, b"\0\xff" * 100), ({"id": 2}, b""), ({"id": 3}, b"x")]
    data = b"".join(encode(message, body) for message, body in frames)
    for step in (1, 7, 64, len(data)):
        buffer = FrameBuffer()
        seen = [
            frame
            for start in range(0, len(data), step)
            for frame in buffer.feed(data[start : start + step])
        ]
        assert seen == frames


def test_a_body_that_is_too_long_is_refused_by_both_ends() -> None:
    with pytest.raises(FrameError):
        encode({}, b"x" * (MAX_BODY_BYTES + 1))
    with pytest.raises(FrameError):
        FrameBuffer().feed((2).to_bytes(4, "big") + (1 << 31).to_bytes(4, "big"))


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff\xff"])
def test_what_is_not_an_object_is_refused(text: bytes) -> None:
    data = len(text).to_bytes(4, "big") + (0).to_bytes(4, "big") + text
    with pytest.raises(FrameError):
        FrameBuffer().feed(data)
