"""One session on a server: connect, one message at a time, close, and why it ended.

All sessions of the process live on the shared background loop. A message is sent by the thread that
has it, where that is safe: through the loop a step would take 60 us more.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from websockets.exceptions import ConnectionClosed

from twinkle_agentic._aio.loop import background_loop
from twinkle_agentic._aio.mailbox import Mailbox, mailbox_of
from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvTimeoutError,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv._config import ConnectionConfig
from twinkle_agentic.envs.openenv._protocol import (
    CLOSE_MESSAGE,
    MessageType,
    decode,
    ends_session,
    unsolicited,
)
from twinkle_agentic.envs.openenv._servers import Servers
from twinkle_agentic.envs.openenv._websocket import WebSocket, closed_error

__all__ = ["Session", "backoff_delays"]

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
_SIGNAL_CHECK_S = 0.5  # a signal that arrives just before a longer wait would be seen at its end
_STUCK_S = 5.0  # beyond the limit that the background loop enforces itself
_EXIT_GRACE_S = 2.0  # all sessions together, when the interpreter exits


@dataclass(slots=True, eq=False)
class _Message:
    """One message and where its answer goes.

    Attributes:
        deliver: Called once, in any thread, with the answer's data or with the reason why there is
            none.
    """

    kind: MessageType
    frame: bytes
    deliver: Callable[[dict[str, Any] | None, TwinkleEnvError | None], None]


class Session:
    """What one client holds on a server: at most one connection, with one message in flight.

    It never guesses: what leaves the order of answers unknown ends the connection, and every
    request fails with the reason until `start` opens a new one. Of use in the process alone that
    started it.

    Args:
        servers: Where a session may be.
        config: The limits.
    """

    def __init__(self, servers: Servers, config: ConnectionConfig) -> None:
        self._servers = servers
        self._config = config
        self._timeout_s = config.message_timeout_s
        self._pid = 0
        self._starting = asyncio.Lock()
        self._closings = 0
        self._loop: asyncio.AbstractEventLoop
        self._mailbox: Mailbox
        # Guards the fields below, for a message may be sent from the caller's own thread.
        self._guard = threading.Lock()
        self._failure: TwinkleEnvError | None = SessionClosedError("no episode has been started")
        self._websocket: WebSocket | None = None
        self._current: _Message | None = None
        self._queue: deque[_Message] = deque()
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None  # of the loop alone

    @property
    def is_open(self) -> bool:
        """Whether a request could be sent."""
        return self._failure is None and self._pid == os.getpid()

    async def start(self, kind: MessageType, frame: bytes) -> dict[str, Any]:
        """Send a message that needs no earlier one, over the open connection or a new one.

        Waits for room on a full server, with growing random delays, up to `capacity_timeout_s`. On
        the background loop.

        Raises:
            CapacityError: The server stayed full.
            SessionClosedError: `close` was called meanwhile, among other reasons.
            TwinkleEnvError: Connecting failed, or what became of the message.
        """
        self._check_process()
        closings = self._closings
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self._mailbox = mailbox_of(self._loop)
        async with self._starting:
            # An idle connection may have died unnoticed, as after a server's restart. A reset
            # starts from nothing, so it may as well do so on a new connection.
            if self.is_open:
                with contextlib.suppress(SessionClosedError):
                    return await self.request(kind, frame)
            return await self._start_anew(kind, frame, closings)

    async def request(self, kind: MessageType, frame: bytes) -> dict[str, Any]:
        """Send one message and await its answer, on any event loop; requests queue in order.

        Raises:
            SessionClosedError: There is no session (any more); its text has the original reason.
            TwinkleEnvError: What became of this message.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, Any]] = loop.create_future()
        deliver = partial(_resolve, future)
        if self._pid and loop is not self._loop:
            deliver = partial(_resolve_in, mailbox_of(loop), future)
        message = _Message(kind, frame, deliver)
        self._send(message)
        try:
            return await future
        except asyncio.CancelledError:
            self._mailbox.post(self._cancel, message)
            raise

    def request_sync(self, kind: MessageType, frame: bytes) -> dict[str, Any]:
        """Send one message and block the calling thread until its answer is there; as `request`.

        Raises:
            RuntimeError: Called on the background loop itself, where it would wait for ever.
            EnvTimeoutError: No answer in time; also where the background thread is stuck and cannot
                say so itself.
        """
        if self._pid and _running_loop() is self._loop:
            raise RuntimeError(
                "a sync method was called on the background loop: await its async twin"
            )
        answered = _thread.allocate_lock()
        answered.acquire()
        outcome: list[Any] = []

        def deliver(answer: dict[str, Any] | None, error: TwinkleEnvError | None) -> None:
            outcome[:] = (answer, error)
            answered.release()

        message = _Message(kind, frame, deliver)
        waits_s = (1 + len(self._queue)) * self._timeout_s + _STUCK_S  # those before it included
        try:
            self._send(message)
            if not answered.acquire(timeout=_SIGNAL_CHECK_S):
                deadline = time.monotonic() + waits_s
                while not answered.acquire(timeout=_SIGNAL_CHECK_S):
                    if time.monotonic() > deadline:
                        raise self._stuck(kind)
        except BaseException:  # Ctrl-C, among others
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the session with it
                self._mailbox.post(self._cancel, message)
            raise
        answer, error = outcome
        if error is not None:
            raise error
        return answer

    async def close(self) -> None:
        """End the session: the server has `close_timeout_s` to free it; on the background loop.

        A message in flight is not waited for: it fails, and the connection is cut.
        """
        if self._pid != os.getpid():
            return
        self._closings += 1  # ends a `start` on its way, too
        with self._guard:
            websocket = self._websocket if self._current is None else None
            if websocket is not None:
                self._websocket = None
            self._failure = self._failure or SessionClosedError("the client is closed")
        if websocket is None:
            self._fail(SessionClosedError("the client was closed"))
            return
        _open_sessions.discard(self)
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                websocket.send_on_loop(CLOSE_MESSAGE)
                # The server closes the connection once the environment is closed and its slot free.
                await websocket.wait_closed()
        except TimeoutError:
            pass
        finally:
            websocket.cut()

    def drop(self) -> None:
        """Close from any thread without waiting, for a client that was forgotten."""
        if self._websocket is not None and self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its sockets with it
                self._loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        task = self._loop.create_task(self.close())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def _start_anew(self, kind: MessageType, frame: bytes, closings: int) -> dict[str, Any]:
        capacity_timeout_s = self._config.capacity_timeout_s
        deadline = self._loop.time() + capacity_timeout_s
        for delay in backoff_delays():
            self._check_wanted(closings)
            try:
                # Time in the server's queue is time without an answer.
                wait_s = min(deadline - self._loop.time(), self._timeout_s / 2)
                self._attach(await self._servers.open(wait_s=wait_s))
                if self._closings != closings:
                    await self.close()
                self._check_wanted(closings)
                if self._failure is not None:
                    raise self._failure
                return await self.request(kind, frame)
            except CapacityError as full:
                self._servers.refused()
                left = deadline - self._loop.time()
                if left <= 0:
                    raise CapacityError(
                        f"no free session on {self._servers.where} within "
                        f"capacity_timeout_s={capacity_timeout_s:g} ({full}): run fewer "
                        "episodes at once, raise capacity_timeout_s, or give the server more room "
                        "(max_concurrent_envs, workers)"
                    ) from full
            await asyncio.sleep(min(delay, max(left, 0.0)))
        raise AssertionError("backoff_delays never ends")

    def _check_process(self) -> None:
        if self._pid not in (0, os.getpid()):
            raise SessionClosedError(
                "this client was used before the process was forked: make clients in the child, or "
                'start processes with the method "spawn"'
            )

    def _check_wanted(self, closings: int) -> None:
        if self._closings != closings:
            raise SessionClosedError("the client was closed while it connected to the server")

    def _attach(self, websocket: WebSocket) -> None:
        with self._guard:
            self._failure, self._websocket = None, websocket
        _open_sessions.add(self)
        websocket.listen(self)

    def _send(self, message: _Message) -> None:
        """Send a message, now or when those before it are answered; from any thread."""
        self._check_process()
        with self._guard:
            failure = self._failure
            if failure is None:
                if self._current is None:
                    self._send_next(message)
                else:
                    self._queue.append(message)
        if failure is not None:
            message.deliver(None, _lost(failure))

    def _send_next(self, message: _Message) -> None:
        """Send a message; the guard is held, and no other is in flight."""
        assert self._websocket is not None
        self._current = message  # first: Ctrl-C may arrive in any of these lines
        self._deadline = self._loop.time() + self._timeout_s
        on_loop = _running_loop() is self._loop
        if not self._websocket.send_now(message.frame):
            if not on_loop:
                self._mailbox.post(self._send_later, message)
                return
            self._websocket.send_on_loop(message.frame)
        if on_loop:
            self._arm()
        elif self._timer is None:
            self._mailbox.post(self._arm)

    def _send_later(self, message: _Message) -> None:
        """Send, on the loop, what another thread could not."""
        with self._guard:
            if message is self._current and self._websocket is not None:
                self._deadline = self._loop.time() + self._timeout_s
                self._websocket.send_on_loop(message.frame)
                self._arm()

    def _arm(self) -> None:
        """Have the message in flight checked when it is due; one timer serves all in turn."""
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check_due)

    def _check_due(self) -> None:
        self._timer = None
        with self._guard:
            message = self._current
            due = message is not None and self._loop.time() >= self._deadline
            if message is not None and not due:
                self._arm()
        if message is not None and due:
            self._fail(
                EnvTimeoutError(
                    f"no answer to {message.kind} within {self._timeout_s:g} s: the session was "
                    "closed, for its state is unknown; raise message_timeout_s if the environment "
                    "takes longer"
                )
            )

    def on_message(self, frame: bytes) -> None:
        """Take what arrived for the answer to the message in flight; called on the loop."""
        message = self._current
        if message is None:
            self._fail(unsolicited(frame))
            return
        answer, error = None, None
        try:
            answer = decode(frame, message.kind)
        except TwinkleEnvError as raised:
            error = raised
        if error is not None and ends_session(error):
            self._fail(error)
            return
        with self._guard:
            self._current = None
            if self._queue:
                self._send_next(self._queue.popleft())
        message.deliver(answer, error)

    def on_closed(self, reason: ConnectionClosed) -> None:
        """Take note that the connection has ended; called on the loop."""
        self._fail(closed_error(reason, self._config))

    def _cancel(self, message: _Message) -> None:
        """Take a message back, on the loop; one that was sent leaves the state unknown."""
        with self._guard:
            sent = message is self._current
            if message in self._queue:
                self._queue.remove(message)
        if sent:
            self._fail(
                SessionClosedError(
                    f"a {message.kind} was cancelled while its answer was due: the session was "
                    "closed"
                )
            )

    def _stuck(self, kind: MessageType) -> EnvTimeoutError:
        error = EnvTimeoutError(
            f"no answer to {kind} within {self._timeout_s:g} s, and the background thread does not "
            "end the session: something blocks it; never call blocking code on the background loop"
        )
        with self._guard:
            self._failure = self._failure or error
        return error

    def _fail(self, reason: TwinkleEnvError) -> None:
        """End the session at once, on the loop: the message in flight fails with `reason`."""
        with self._guard:
            failure = self._failure = self._failure or reason
            current, self._current = self._current, None
            waiting, self._queue = self._queue, deque()
            websocket, self._websocket = self._websocket, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _open_sessions.discard(self)
        if websocket is not None:
            websocket.cut()
        if current is not None:
            current.deliver(None, failure)
        for message in waiting:
            message.deliver(None, _lost(failure))


def backoff_delays(
    first_s: float = _FIRST_DELAY_S, longest_s: float = _LONGEST_DELAY_S
) -> Iterator[float]:
    """Yield random delays (s) without end; their bound doubles from `first_s` to `longest_s`."""
    bound = first_s
    while True:
        yield random.uniform(bound / 2, bound)
        bound = min(bound * 2, longest_s)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    return asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage]


def _lost(failure: TwinkleEnvError) -> SessionClosedError:
    return SessionClosedError(f"the session is lost, call reset: {failure}")


def _resolve(
    future: asyncio.Future[dict[str, Any]],
    answer: dict[str, Any] | None,
    error: TwinkleEnvError | None,
) -> None:
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer or {})


def _resolve_in(caller: Mailbox, *resolution: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the caller's loop is closed
        caller.post(_resolve, *resolution)


# Strong references: an open session must not be collected before it was closed.
_open_sessions: set[Session] = set()
_closing: set[asyncio.Task[None]] = set()


def _close_at_exit() -> None:
    sessions = [session for session in _open_sessions if session.is_open]

    async def close_all() -> None:
        await asyncio.wait([asyncio.ensure_future(session.close()) for session in sessions])

    if sessions:
        work = asyncio.run_coroutine_threadsafe(close_all(), background_loop())
        with contextlib.suppress(Exception):
            work.result(_EXIT_GRACE_S)


atexit.register(_close_at_exit)
