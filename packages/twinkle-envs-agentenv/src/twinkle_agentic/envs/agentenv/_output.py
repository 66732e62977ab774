"""What a command did: its output in bounded memory, and the text a model sees of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Self

from twinkle_agentic.tools.text import MAX_TEXT_CHARS, clean_text

_SLACK = 64  # trailing newlines that may be stripped from a stream that was cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command did.

    Attributes:
        stdout: Its standard output as text (bytes that are no UTF-8 are U+FFFD). Of long output
            head and tail are kept, with a line between them that says how much is missing.
        stderr: Its standard error, likewise.
        exit_code: `None` where the command was killed at its time limit; -1 where another signal
            ended it.
        timed_out: It ran into its time limit and was killed, with every process it had started.
        duration_s: Wall time, the round trip included.
        cut_chars: Characters missing from `stdout` and `stderr` together.
    """

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    cut_chars: int = 0


class CommandOutput(str):
    """The text of a command that a model reads, with what `step` reports in `info`.

    Attributes:
        exit_code: As in `ExecResult`.
        timed_out: As in `ExecResult`.
    """

    exit_code: int | None
    timed_out: bool

    def __new__(cls, text: str, *, exit_code: int | None = 0, timed_out: bool = False) -> Self:
        made = super().__new__(cls, text)
        made.exit_code = exit_code
        made.timed_out = timed_out
        return made


class HeadTail:
    """The head and the tail of a stream of text, in bounded memory.

    Args:
        max_chars: Characters kept (>= 2), half of them from each end.
    """

    def __init__(self, max_chars: int = MAX_TEXT_CHARS) -> None:
        self.max_chars = max_chars
        self.length = 0
        self._head_room = (max_chars + 1) // 2
        self._tail_room = max_chars // 2
        self._head: list[str] = []
        self._tail: deque[str] = deque()
        self._tail_length = 0

    def add(self, text: str) -> None:
        """Append the next piece."""
        self.length += len(text)
        if self._head_room:
            self._head.append(text[: self._head_room])
            text, self._head_room = text[self._head_room :], max(0, self._head_room - len(text))
        if not text:
            return
        self._tail.append(text[-self._tail_room :])
        self._tail_length += len(self._tail[-1])
        while self._tail_length - len(self._tail[0]) >= self._tail_room:
            self._tail_length -= len(self._tail.popleft())

    @property
    def cut(self) -> int:
        """Characters that are missing."""
        return max(0, self.length - self.max_chars)

    def ends(self) -> tuple[str, str]:
        """Return what is kept from both ends; nothing is missing between them unless `cut`."""
        tail = "".join(self._tail)
        return "".join(self._head), tail[-self._tail_room :] if self.cut else tail

    def stripped_ends(self) -> tuple[str, str]:
        """Return the ends without trailing newlines."""
        head, tail = self.ends()
        if not self.cut:
            return ((head + tail).rstrip("\n"), "")
        short = tail.rstrip("\n")
        return (head, short if len(tail) - len(short) <= _SLACK else tail)

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


class CommandRun:
    """A command while it runs, and after: an `ExecResult` in the making.

    `advice` is for the model, where it was killed at its time limit; `cause` has the server's words
    for what killed it before. `max_chars` are kept of each stream and of the rendered text.
    """

    def __init__(self, timeout_s: float, *, max_chars: int = MAX_TEXT_CHARS) -> None:
        self.timeout_s = timeout_s
        self.max_chars = max_chars
        self.stdout = HeadTail(max_chars + 2 * _SLACK)
        self.stderr = HeadTail(max_chars + 2 * _SLACK)
        self.exit_code: int | None = None
        self.timed_out = False
        self.duration_s = 0.0
        self.advice = ""
        self.cause = ""

    def result(self) -> ExecResult:
        """Return its parts."""
        return ExecResult(
            stdout=self.stdout.text(),
            stderr=self.stderr.text(),
            exit_code=self.exit_code,
            timed_out=self.timed_out,
            duration_s=self.duration_s,
            cut_chars=self.stdout.cut + self.stderr.cut,
        )

    def output(self) -> CommandOutput:
        """Render it for a model.

        Standard output comes first; standard error, a non-zero exit code and a timeout follow as
        marked parts. Trailing newlines are stripped.
        """
        parts: list[tuple[str, ...]] = [self.stdout.stripped_ends()]
        errors = self.stderr.stripped_ends()
        if any(errors):
            parts.append(("[stderr]\n", *errors))
        if self.timed_out:
            parts.append((f"[killed: no end within {self.timeout_s:g} s{self.advice}]",))
        elif self.exit_code:
            parts.append((f"[exit code {self.exit_code}{self.cause and f': {self.cause}'}]",))
        whole = HeadTail(self.max_chars)
        for part in filter(any, parts):
            if whole.length:
                whole.add("\n")
            for piece in part:
                whole.add(piece)
        # A stream that dropped its middle is longer than the whole may be, and what it dropped lies
        # in what the whole drops.
        text = whole.text(also_cut=self.stdout.cut + self.stderr.cut)
        return CommandOutput(text, exit_code=self.exit_code, timed_out=self.timed_out)
