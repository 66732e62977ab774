"""A stop for the requests of a rollout, while the weights behind the endpoint are updated."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any, Literal

from twinkle_agentic._aio.bounded import Deadline
from twinkle_agentic._aio.limits import check_limit

__all__ = ["OnPause", "RequestPause"]

OnPause = Literal["finish", "abort"]
"""What becomes of requests that run: they finish, or are aborted and sent again afterwards."""

_SIGNAL_CHECK_S = 0.5


class _Request:
    """One running request; `limit` ends it at once where it is aborted."""

    def __init__(self, limit: asyncio.Timeout, version: Any) -> None:
        self.limit, self.version = limit, version
        self.loop = asyncio.get_running_loop()
        self.aborted = self.ended = False

    def abort(self) -> None:
        if not self.ended:
            self.aborted = True
            with contextlib.suppress(RuntimeError):  # its own limit has just passed
                self.limit.reschedule(-1)


class RequestPause:
    """Whether requests may start, and those that run, in all event loops. Thread-safe.

    Attributes:
        policy_version: What the requests that start from now on are sampled with.
    """

    def __init__(self) -> None:
        self.policy_version: Any = None
        self._changed = threading.Condition()
        self._paused = False
        self._max_pause_s = 0.0
        self._running: set[_Request] = set()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()

    async def wait(self, deadline: Deadline) -> float:
        """Wait while the rollout is paused, and move the deadline by the wait.

        Returns:
            Seconds.

        Raises:
            TimeoutError: The pause was longer than it may be.
        """
        if not self._paused:
            return 0.0
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        while True:
            resumed = loop.create_future()
            entry = (loop, resumed)
            with self._changed:
                if not self._paused:
                    break
                self._waiting.add(entry)
            limit_s = self._max_pause_s
            try:
                async with asyncio.timeout(started + limit_s - time.monotonic()):
                    await resumed
            except TimeoutError:
                raise TimeoutError(f"the rollout was paused for more than {limit_s:g} s") from None
            finally:
                self._waiting.discard(entry)
        waited = time.monotonic() - started
        deadline.postpone(waited)
        return waited

    def enter(self, limit: asyncio.Timeout) -> _Request | None:
        """Note a request that starts; `None` where the rollout is paused, so that none may."""
        with self._changed:
            if self._paused:
                return None
            request = _Request(limit, self.policy_version)
            self._running.add(request)
            return request

    def leave(self, request: _Request) -> None:
        """Note that a request has ended."""
        request.ended = True
        with self._changed:
            self._running.discard(request)
            if self._paused:
                self._changed.notify_all()

    def pause(self, on_pause: OnPause, timeout_s: float, max_pause_s: float) -> int:
        """Let no request start, and wait until none runs; returns how many were aborted."""
        check_limit("timeout_s", timeout_s)
        check_limit("max_pause_s", max_pause_s)
        with self._changed:
            self._refuse_own_loop()
            self._paused, self._max_pause_s = True, max_pause_s
            if on_pause == "finish":
                self._wait_until_idle(time.monotonic() + timeout_s)
            aborted = list(self._running)
            for request in aborted:
                request.loop.call_soon_threadsafe(request.abort)
            if not self._wait_until_idle(time.monotonic() + timeout_s):
                raise TimeoutError(
                    f"{len(self._running)} requests did not end within {timeout_s:g} s of their "
                    "abort; the rollout stays paused"
                )
            return len(aborted)

    def resume(self) -> None:
        """Let requests start again."""
        with self._changed:
            self._paused = False
            waiting, self._waiting = list(self._waiting), set()
        for loop, resumed in waiting:
            loop.call_soon_threadsafe(_set, resumed)

    def _wait_until_idle(self, until: float) -> bool:
        while self._running and (left_s := until - time.monotonic()) > 0:
            self._changed.wait(min(left_s, _SIGNAL_CHECK_S))
        return not self._running

    def _refuse_own_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if any(request.loop is loop for request in self._running):
            raise RuntimeError("pause() was called on the event loop of the rollout: await apause")


def _set(resumed: asyncio.Future[None]) -> None:
    if not resumed.done():
        resumed.set_result(None)
