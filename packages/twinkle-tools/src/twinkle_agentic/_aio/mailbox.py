"""Calls into an event loop from other threads, many for the price of one wake-up."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Mailbox", "mailbox_of"]


class Mailbox:
    """Calls into one loop from other threads, in order; those posted together wake the loop once.

    With hundreds of sessions in flight this costs a third of a `call_soon_threadsafe` each. A call
    that Ctrl-C interrupts is made again when the loop goes on, and must bear that.
    """

    __slots__ = ("_awake", "_calls", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._awake = False

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call a function soon.

        Raises:
            RuntimeError: The loop is closed.
        """
        self._calls.append((function, args))
        if not self._awake:
            self._wake()

    def _wake(self) -> None:
        try:
            self._awake = True
            loop = self._loop()
            if loop is None:
                raise RuntimeError("Event loop is closed")
            loop.call_soon_threadsafe(self._drain)
        except BaseException:  # Ctrl-C: the next post must wake the loop
            self._awake = False
            raise

    def _drain(self) -> None:
        self._awake = False  # before the first look, so that nothing posted from here on is missed
        calls = self._calls
        try:
            for _ in range(len(calls)):
                if not calls:  # made by a loop that was run inside one of them
                    return
                call = calls[0]
                try:
                    call[0](*call[1])
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    loop = self._loop()
                    if loop is not None:
                        loop.call_exception_handler(
                            {"message": "a posted call raised", "exception": error}
                        )
                if calls and calls[0] is call:
                    calls.popleft()
        except KeyboardInterrupt:  # on a loop of the main thread: the rest when it goes on
            if calls and not self._awake:
                self._wake()
            raise


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the mailbox of a loop."""
    box = _mailboxes.get(loop)
    if box is None:
        with _lock:
            box = _mailboxes.setdefault(loop, Mailbox(loop))
    return box
