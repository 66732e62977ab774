"""Frames on their way to the host, bounded: nobody produces data while the host is behind."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from twinkle_isolation._guest.files import failure_of
from twinkle_isolation._wire import Message, encode

__all__ = ["Outbox"]

_HIGH_WATER_BYTES = 1 << 20


class Outbox:
    """Everything that waits to be sent on `channel`.

    Attributes:
        throttled: The host is behind: produce nothing more for now.
        on_change: Called when `throttled` changes.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._frames: deque[memoryview] = deque()
        self._bytes = 0
        self.throttled = False
        self.on_change: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> bool:
        """Something waits to be sent."""
        return bool(self._frames)

    def send(self, message: Message, body: bytes = b"") -> None:
        """Queue one frame."""
        frame = encode(message, body)
        self._frames.append(memoryview(frame))
        self._bytes += len(frame)
        if self._bytes > _HIGH_WATER_BYTES and not self.throttled:
            self.throttled = True
            self.on_change()

    def send_error(self, request_id: object, error: BaseException) -> None:
        """Queue the answer that a request failed."""
        failure = failure_of(error)
        self.send({"id": request_id, "ev": "error", "code": failure.code, "message": str(failure)})

    def flush(self) -> None:
        """Send what the connection takes now."""
        while self._frames:
            try:
                sent = self._channel.send(self._frames[0])
            except BlockingIOError:
                break
            self._bytes -= sent
            if sent == len(self._frames[0]):
                self._frames.popleft()
            else:
                self._frames[0] = self._frames[0][sent:]
        if self.throttled and self._bytes < _HIGH_WATER_BYTES // 4:
            self.throttled = False
            self.on_change()
