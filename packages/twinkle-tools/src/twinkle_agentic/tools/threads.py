"""Blocking calls beside an event loop: daemon threads, reused, and given up when they hang.

`concurrent.futures.ThreadPoolExecutor` joins its threads at interpreter exit and lets one call that
never returns take a thread for good. Tools and environments are other people's code, so both happen.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

__all__ = ["BlockingCallError", "ThreadPool", "current_pool", "run_blocking", "use_pool"]

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_EXIT_S = 30.0  # an idle thread ends by itself after this long


class BlockingCallError(RuntimeError):
    """A blocking call raised `SystemExit`, `KeyboardInterrupt` or the like; `__cause__` holds it."""


class ThreadPool:
    """Runs blocking calls in daemon threads, at most `max_threads` at once.

    Threads start on demand, are reused, and end after 30 s without work. Further calls queue in
    order. `abandon` gives up on a running call: its place is free at once, its thread ends whenever
    the call returns, and it never delays the exit of the interpreter. Thread-safe.
    """

    def __init__(self, max_threads: int = 256) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads must be at least 1, found {max_threads}")
        self.max_threads = max_threads
        self._lock = threading.Lock()
        self._idle: deque[_Worker] = deque()
        self._waiting: deque[_Call] = deque()
        self._busy = 0

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call, or queue it, and return its future.

        The call sees a copy of the caller's context variables. Cancelling the future works until the
        call has started.
        """
        call = _Call(function, args, kwargs, contextvars.copy_context())
        with self._lock:
            if self._busy >= self.max_threads:
                self._waiting.append(call)
            else:
                self._busy += 1
                self._start(call)
        return call.future

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a blocking call; when the awaiting task is cancelled, the call is abandoned."""
        future = self.submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(future)
            raise

    def abandon(self, future: Future[Any]) -> None:
        """Stop waiting for a call: drop it where it is queued, free its place where it runs."""
        if future.cancel():
            return
        with self._lock:
            call = getattr(future, "_twinkle_call", None)
            if isinstance(call, _Call) and call.running and not call.abandoned:
                call.abandoned = True
                self._release()

    def _start(self, call: _Call) -> None:
        if self._idle:
            self._idle.pop().give(call)
        else:
            _Worker(self, call)

    def _release(self) -> None:
        """Hand the freed place to the next queued call. The lock is held."""
        while self._waiting:
            call = self._waiting.popleft()
            if not call.future.cancelled():
                self._start(call)
                return
        self._busy -= 1

    def finished(self, worker: _Worker, call: _Call) -> None:
        """Take back a worker whose call returned; called by the worker alone."""
        with self._lock:
            call.running = False
            self._idle.append(worker)
            if not call.abandoned:
                self._release()

    def retire(self, worker: _Worker) -> bool:
        """Let an idle worker end, unless it has just been given a call."""
        with self._lock:
            try:
                self._idle.remove(worker)
            except ValueError:
                return False
            return True


class _Call:
    """One call with its future."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: contextvars.Context,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.context = context
        self.running = False
        self.abandoned = False
        self.future: Future[Any] = Future()
        self.future._twinkle_call = self  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> None:
        self.running = True  # before the state changes, so that `abandon` cannot miss it
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.context.run(self.function, *self.args, **self.kwargs)
        except Exception as error:
            self.future.set_exception(error)
        except BaseException as error:
            # SystemExit or KeyboardInterrupt raised by other people's code would stop the event loop
            # of whoever awaits this future.
            wrapped = BlockingCallError(f"the call raised {error!r}")
            wrapped.__cause__ = error
            self.future.set_exception(wrapped)
        else:
            self.future.set_result(result)


class _Worker:
    """One daemon thread and its mailbox."""

    def __init__(self, pool: ThreadPool, call: _Call) -> None:
        self._pool = pool
        self._mail: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._mail.put(call)
        threading.Thread(target=self._loop, name="twinkle-blocking", daemon=True).start()

    def give(self, call: _Call) -> None:
        self._mail.put(call)

    def _loop(self) -> None:
        while True:
            try:
                call = self._mail.get(timeout=_IDLE_EXIT_S)
            except queue.Empty:
                if self._pool.retire(self):
                    return
                call = self._mail.get()
            call.run()
            self._pool.finished(self, call)
            del call  # an idle thread must not keep a result alive


_default: ThreadPool | None = None
_current: ContextVar[ThreadPool | None] = ContextVar("twinkle_thread_pool", default=None)


def current_pool() -> ThreadPool:
    """Return the pool of the running rollout, else the one shared by the process."""
    global _default
    pool = _current.get()
    if pool is None:
        if _default is None:
            _default = ThreadPool()
        pool = _default
    return pool


def use_pool(pool: ThreadPool) -> contextvars.Token[ThreadPool | None]:
    """Make `pool` the one that `run_blocking` takes in the current context (a task and its children)."""
    return _current.set(pool)


async def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in the current pool and await its result.

    Cancellation abandons the call: the awaiting task goes on at once, the thread ends when it can.
    """
    return await current_pool().run(function, *args, **kwargs)


def _forget_after_fork() -> None:
    global _default
    _default = None  # the threads stayed in the parent


os.register_at_fork(after_in_child=_forget_after_fork)
