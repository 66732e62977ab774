"""The files of a `multipart/form-data` body, one after the other, as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Literal

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sandbox_server.errors import ApiError

_MAX_HEADER_BYTES = 16 << 10
_MAX_PARTS = 1000

FormEvent = tuple[Literal["file", "data", "end"], bytes]
"""`file` with a name, the `data` of that file, its `end`."""


async def form_events(content_type: str, source: AsyncIterator[bytes]) -> AsyncIterator[FormEvent]:
    """Yield what a form holds; parts that are no file are left out. Nothing is kept. Raises 400."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise ApiError(400, "the form cannot be read: its content type has no boundary")
    form = _Form()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": form.begin,
            "on_header_field": form.add_name,
            "on_header_value": form.add_value,
            "on_header_end": form.end_header,
            "on_headers_finished": form.start_file,
            "on_part_data": form.add_data,
            "on_part_end": form.end_file,
            "on_end": form.finish,
        },
    )
    async for piece in source:
        try:
            parser.write(piece)
        except FormParserError as error:
            raise ApiError(400, f"the form cannot be read: {error}") from error
        while form.events:
            yield form.events.popleft()
    if not form.complete:
        raise ApiError(400, "the form ends in the middle")


async def file_content(events: AsyncIterator[FormEvent]) -> AsyncIterator[bytes]:
    """Yield the data of the file that `events` has just named."""
    async for kind, data in events:
        if kind == "end":
            return
        yield data


class _Form:
    """What the parser says, as events."""

    def __init__(self) -> None:
        self.events: deque[FormEvent] = deque()
        self.complete = False
        self._parts = 0
        self._name = self._value = self._disposition = b""
        self._header_bytes = 0
        self._is_file = False

    def begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise ApiError(400, f"the form has more than {_MAX_PARTS} parts")
        self._name = self._value = self._disposition = b""
        self._header_bytes = 0
        self._is_file = False

    def add_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._name += data[start:end]

    def add_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._value += data[start:end]

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise ApiError(
                400, f"a part of the form has more than {_MAX_HEADER_BYTES} header bytes"
            )

    def end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def start_file(self) -> None:
        name = parse_options_header(self._disposition)[1].get(b"filename")
        if name is not None:
            self._is_file = True
            self.events.append(("file", name))

    def add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.events.append(("data", data[start:end]))

    def end_file(self) -> None:
        if self._is_file:
            self.events.append(("end", b""))

    def finish(self) -> None:
        self.complete = True
