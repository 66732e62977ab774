"""Text that may be endless, kept within a limit: its head and its tail."""

from __future__ import annotations

from collections import deque

__all__ = ["BoundedText", "encodable"]


class BoundedText:
    """Collects text and keeps at most `limit` characters: the first and the last half.

    Memory is bounded by twice the limit, however much is added.
    """

    def __init__(self, limit: int) -> None:
        self._head_room = limit - limit // 2
        self._tail_limit = limit // 2
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._tail_chars = 0
        self._cut = 0

    def add(self, text: str) -> None:
        """Append `text`."""
        if self._head_room:
            self._head.append(text[: self._head_room])
            taken = len(self._head[-1])
            self._head_room -= taken
            text = text[taken:]
        if not text:
            return
        if len(text) > self._tail_limit:
            self._cut += len(text) - self._tail_limit
            text = text[len(text) - self._tail_limit :]
        self._tail.append(text)
        self._tail_chars += len(text)
        # Whole pieces only: cutting a piece on every call would copy it again and again.
        while self._tail_chars - len(self._tail[0]) >= self._tail_limit:
            gone = len(self._tail.popleft())
            self._tail_chars -= gone
            self._cut += gone

    def text(self) -> str:
        """Return what was kept; a line in the middle says how much was not."""
        tail = "".join(self._tail)
        over = max(0, len(tail) - self._tail_limit)
        cut = self._cut + over
        middle = f"\n[{cut:,} characters cut]\n" if cut else ""
        return "".join(self._head) + middle + tail[over:]


def encodable(text: str) -> str:
    """Replace lone surrogates by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text
