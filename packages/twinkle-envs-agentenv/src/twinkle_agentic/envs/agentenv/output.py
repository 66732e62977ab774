"""Output of a command in bounded memory, and the text a model sees of it."""

from __future__ import annotations

from collections import deque

from twinkle_agentic.tools.text import MAX_TEXT_CHARS, clean_text

__all__ = ["Clip", "observation_of", "stream_clip"]

_SLACK = 64  # trailing newlines that may be stripped from a stream that was cut


class Clip:
    """The head and the tail of a stream of text, in bounded memory.

    Args:
        max_chars: Characters kept (>= 2), half of them from each end.
    """

    def __init__(self, max_chars: int = MAX_TEXT_CHARS) -> None:
        self.max_chars = max_chars
        self.length = 0
        self._room = (max_chars + 1) // 2
        self._keep = max_chars // 2
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._tail_length = 0

    def add(self, text: str) -> None:
        """Take in the next piece."""
        self.length += len(text)
        if self._room:
            self._head.append(text[: self._room])
            text, self._room = text[self._room :], max(0, self._room - len(text))
        if not text:
            return
        self._tail.append(text[-self._keep :])
        self._tail_length += len(self._tail[-1])
        while self._tail_length - len(self._tail[0]) >= self._keep:
            self._tail_length -= len(self._tail.popleft())

    @property
    def cut(self) -> int:
        """Characters that are missing."""
        return max(0, self.length - self.max_chars)

    def ends(self) -> tuple[str, str]:
        """Return what is kept from both ends; nothing is missing between them unless `cut`."""
        tail = "".join(self._tail)
        return "".join(self._head), tail[-self._keep :] if self.cut else tail

    def text(self, *, also_cut: int = 0) -> str:
        """Return the text, with a line in the middle where something is missing.

        Args:
            also_cut: Characters that were missing from the middle of what was added.
        """
        head, tail = self.ends()
        if not self.cut:
            return clean_text(head + tail)
        cut, length = self.cut + also_cut, self.length + also_cut
        return clean_text(f"{head}\n[... {cut} of {length} characters cut ...]\n{tail}")


def stream_clip(max_chars: int = MAX_TEXT_CHARS) -> Clip:
    """Return a clip for one stream of a command whose rendering is to hold `max_chars`."""
    return Clip(max_chars + 2 * _SLACK)


def observation_of(
    stdout: Clip,
    stderr: Clip,
    *,
    exit_code: int | None,
    timed_out_after_s: float | None = None,
    hint: str = "",
    cause: str = "",
    max_chars: int = MAX_TEXT_CHARS,
) -> str:
    """Render a command's output for a model.

    Standard output comes first; standard error, a non-zero exit code and a timeout follow as marked
    parts. Trailing newlines are stripped.

    Args:
        stdout: A `stream_clip` of at least `max_chars`.
        stderr: Likewise.
        exit_code: Shown unless it is 0 or `None`.
        timed_out_after_s: The limit that passed; `None` where none did.
        hint: Follows the mark of a timeout.
        cause: Follows the exit code.
        max_chars: Characters kept of the whole, head and tail.
    """
    parts: list[tuple[str, ...]] = [_stripped(stdout)]
    errors = _stripped(stderr)
    if any(errors):
        parts.append(("[stderr]\n", *errors))
    if timed_out_after_s is not None:
        parts.append((f"[killed: no end within {timed_out_after_s:g} s{hint}]",))
    elif exit_code:
        parts.append((f"[exit code {exit_code}{cause and f': {cause}'}]",))
    whole = Clip(max_chars)
    for part in parts:
        if not any(part):
            continue
        if whole.length:
            whole.add("\n")
        for piece in part:
            whole.add(piece)
    # A stream that dropped its middle is longer than the whole may be, and what it dropped lies in
    # what the whole drops.
    return whole.text(also_cut=stdout.cut + stderr.cut)


def _stripped(clip: Clip) -> tuple[str, str]:
    head, tail = clip.ends()
    if not clip.cut:
        return ((head + tail).rstrip("\n"), "")
    short = tail.rstrip("\n")
    return (head, short if len(tail) - len(short) <= _SLACK else tail)
