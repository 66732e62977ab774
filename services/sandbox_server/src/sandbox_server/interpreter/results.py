"""What a piece of code printed and showed, as the events that the SDKs read."""

from __future__ import annotations

import codecs
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, cast

Event = dict[str, Any]
Emit = Callable[[Event], Awaitable[None]]

_MAX_RECORD_BYTES = 16 << 20  # one result in base64
_MAX_PIECE_CHARS = 1 << 16
_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
}


def error_event(name: str, value: str, traceback: str = "") -> Event:
    """Return the event that says why a piece of code failed."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


class Outputs:
    """Turns the output of one piece of code into events.

    What the code writes to its report is not trusted: text that is no record becomes an error.

    Attributes:
        error: The event of the exception that ended the code; kept until the end is known.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: decoder("replace") for name in ("stdout", "stderr")}
        self._record = bytearray()
        self._too_long = False
        self.error: Event | None = None

    async def add(self, stream: str, data: bytes) -> None:
        """Take a piece of output."""
        if stream in self._decoders:
            await self._print(stream, self._decoders[stream].decode(data))
            return
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._keep(line)
            await self._finish_record()
        self._keep(rest)

    async def end(self) -> None:
        """Say what is left, once the code has ended."""
        await self._finish_record()
        for stream, decoder in self._decoders.items():
            await self._print(stream, decoder.decode(b"", final=True))

    async def say(self, text: str) -> None:
        """Add a line of the server's own to the code's stderr."""
        await self._print("stderr", f"[{text}]\n")

    async def _print(self, stream: str, text: str) -> None:
        for start in range(0, len(text), _MAX_PIECE_CHARS):
            piece = text[start : start + _MAX_PIECE_CHARS]
            now = datetime.now(UTC).isoformat()
            await self._emit({"type": stream, "text": piece, "timestamp": now})

    def _keep(self, data: bytes) -> None:
        self._too_long |= len(self._record) + len(data) > _MAX_RECORD_BYTES
        if self._too_long:
            self._record.clear()
        else:
            self._record += data

    async def _finish_record(self) -> None:
        line, too_long = bytes(self._record), self._too_long
        self._record.clear()
        self._too_long = False
        if too_long:
            await self.say(f"a result is left out: it is longer than {_MAX_RECORD_BYTES} bytes")
        elif line:
            try:
                event = _event(json.loads(line, parse_constant=lambda _: None))
                if event["type"] == "error":
                    self.error = event
                else:
                    await self._emit(event)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                await self.say(f"a result of {len(line)} bytes is left out: it is damaged")


def _event(record: Any) -> Event:
    """Return the event of a record of the interpreter (`PythonSession.start`)."""
    if "error" in record:
        error = record["error"]
        return error_event(*(str(error[key]) for key in ("name", "value", "traceback")))
    event: Event = {"type": "result", "is_main_result": bool(record["main"])}
    extra: Event = {}
    for kind, value in cast("dict[str, Any]", record["data"]).items():
        name = _FIELDS.get(kind)
        if name is None or isinstance(value, str) == (name in ("json", "data")):
            extra[kind] = value
        else:
            event[name] = value
    text = event.get("text", "")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        event["text"] = text[1:-1]  # as E2B's own server shows text
    if extra:
        event["extra"] = extra
    return event
