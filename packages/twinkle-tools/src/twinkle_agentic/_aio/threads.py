"""Blocking calls beside an event loop: daemon threads, reused, and abandoned when they hang.

`concurrent.futures.ThreadPoolExecutor` joins its threads at interpreter exit, and a call that never
returns takes one of them for good. Tools and environments are foreign code, so both happen.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

from twinkle_agentic._aio.mailbox import Mailbox, mailbox_of

logger = logging.getLogger(__name__)

__all__ = ["BlockingCallError", "ThreadPool", "current_pool", "run_blocking", "use_pool"]

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_EXIT_S = 30.0  # an idle thread ends by itself after this long
_WAKE_LIMIT_S = 1.0  # then another worker is woken, for Ctrl-C may have cut the wake-up


class BlockingCallError(RuntimeError):
    """A blocking call raised what would end or confuse an event loop; `__cause__` holds it.

    That is whatever is no `Exception` (`SystemExit`, `KeyboardInterrupt`, panics of native
    extensions), `StopIteration`, and the `CancelledError` of a future that the awaiting task has
    nothing to do with.
    """


class ThreadPool:
    """Runs blocking calls in daemon threads, at most `max_threads` at once.

    Threads start on demand, are reused, and end after 30 s without work. Further calls queue in
    order. `abandon` gives up on a running call: its place is free at once, its thread ends whenever
    the call returns, and it never delays the exit of the interpreter. Thread-safe.

    Workers are woken one at a time, each wakes the next. A burst of calls that return at once is
    served by a few threads, a burst of calls that block still gets a thread each; waking hundreds
    at once, which then compete for the interpreter lock, costs twice as much (measured).

    Raises:
        ValueError: `max_threads` is below 1.
    """

    def __init__(self, max_threads: int = 256) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads must be at least 1, found {max_threads}")
        self.max_threads = max_threads
        # Reentrant: a finalizer that runs while it is held may submit a call.
        self._lock = threading.RLock()
        self._idle: dict[_Worker, None] = {}
        self._waiting: OrderedDict[_Call, None] = OrderedDict()
        self._busy = 0  # calls that hold a place
        self._woken_at: float | None = None  # of a worker that has not looked at the queue yet
        self._abandoned = 0

    @property
    def abandoned(self) -> int:
        """How many abandoned calls still run, each in a thread beyond `max_threads`."""
        return self._abandoned

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call, or queue it, and return its future.

        The call sees a copy of the caller's context variables. Cancelling the future works until
        the call has started.

        Raises:
            RuntimeError: The system gives no thread, and no call runs whose thread becomes free.
        """
        call = _Call(self, function, args, kwargs)
        with self._lock:
            self._waiting[call] = None
            worker = self._next_worker()
        if not self._wake(worker) and not self._busy and self.forget(call):
            raise RuntimeError("the system gives no thread for a blocking call")
        return call

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a blocking call; when the awaiting task is cancelled, the call is abandoned.

        Raises:
            BlockingCallError: The call raised something that an event loop takes for its own.
            RuntimeError: The system gives no thread, and no call runs whose thread becomes free.
            Exception: Whatever else the call raises.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()
        future = self.submit(function, *args, **kwargs)
        future.add_done_callback(partial(_deliver, mailbox_of(loop), waiter))
        try:
            return await waiter
        except asyncio.CancelledError:
            self.abandon(future)
            raise
        finally:
            # An exception keeps this frame, so the frame must not keep the exception.
            del future, waiter

    def abandon(self, future: Future[Any]) -> None:
        """Stop waiting for a call, in whichever pool it is.

        A queued one is dropped, the place of a running one is free at once.
        """
        if not future.cancel() and isinstance(future, _Call):
            future.pool.give_up(future)

    def give_up(self, call: _Call) -> None:
        """Free the place of a running call, once."""
        with self._lock:
            if not call.started or call.abandoned:
                return
            call.abandoned = True
            self._abandoned += 1
            count = self._abandoned
            self._busy -= 1
            worker = self._next_worker()
        if count & (count - 1) == 0:  # at 1, 2, 4, 8, ...: not once per call
            logger.warning("%d abandoned calls still hold a thread each", count)
        self._wake(worker)

    def forget(self, call: _Call) -> bool:
        """Take a call out of the queue; returns whether it was there."""
        with self._lock:
            return self._waiting.pop(call, self) is None

    def take(self, worker: _Worker, done: _Call | None) -> _Call | None:
        """Take back a call that returned and hand out the next; called by the worker alone.

        Args:
            worker: Counts as idle where there is no next call.
            done: `None` from a worker that was woken.
        """
        with self._lock:
            if done is None:
                self._woken_at = None
                self._idle.pop(worker, None)  # there if it was woken twice
            else:
                done.started = False
                if done.abandoned:
                    self._abandoned -= 1
                else:
                    self._busy -= 1
            call = None
            if self._waiting and self._busy < self.max_threads:
                call, _ = self._waiting.popitem(last=False)
                self._busy += 1
                # Before its state changes, so that `abandon` cannot miss it.
                call.started = True
            else:
                self._idle[worker] = None
            following = self._next_worker()
        self._wake(following)
        return call

    def retire(self, worker: _Worker) -> bool:
        """Let an idle worker end, unless it has just been woken."""
        with self._lock:
            return self._idle.pop(worker, self) is None

    def _next_worker(self) -> _Worker | None:
        """Choose the worker to wake, where one is due. The lock is held."""
        if not self._waiting or self._busy >= self.max_threads:
            return None
        now = time.monotonic()
        if self._woken_at is not None and now - self._woken_at < _WAKE_LIMIT_S:
            return None
        self._woken_at = now
        return self._idle.popitem()[0] if self._idle else _Worker(self)

    def _wake(self, worker: _Worker | None) -> bool:
        """Wake a worker, if one is given; returns False where the system gives no thread."""
        if worker is None:
            return True
        try:
            worker.wake()
        except RuntimeError as error:
            self._woken_at = None
            logger.warning(
                "no further thread (%s): calls wait for the %d that run", error, self._busy
            )
            return False
        return True


class _Call(Future[Any]):
    """One call, which is its own future."""

    def __init__(
        self,
        pool: ThreadPool,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__()
        self.started = False
        self.abandoned = False
        self.pool = pool
        self._work: _Work | None = (contextvars.copy_context(), function, args, kwargs)

    def cancel(self) -> bool:
        if not super().cancel():
            return False
        self._work = None
        if self.pool.forget(self):
            self.set_running_or_notify_cancel()  # no worker will
        return True

    def run(self) -> None:
        if not self.set_running_or_notify_cancel() or self._work is None:
            return
        work, self._work = self._work, None
        result, error = _outcome(*work)
        del work
        self._end(result, error)
        if error is not None:
            # The traceback keeps this frame, the frame this future, the future the traceback.
            del self, error

    def _end(self, result: Any, error: BaseException | None) -> None:
        try:
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)
        except BaseException:  # the future contains an `Exception` of a callback itself
            logger.exception("a done callback of a blocking call raised")


_Work = tuple[contextvars.Context, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _outcome(
    context: contextvars.Context,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, BaseException | None]:
    try:
        return context.run(function, *args, **kwargs), None
    except BaseException as error:
        special = (StopIteration, concurrent.futures.CancelledError)
        if isinstance(error, Exception) and not isinstance(error, special):
            return None, error
        wrapped = BlockingCallError(f"the call raised {type(error).__name__}")
        wrapped.__cause__ = error
        return None, wrapped


class _Worker:
    """One daemon thread; it sleeps until it is woken, then works until the queue is empty."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._bell: queue.SimpleQueue[None] | None = None

    def wake(self) -> None:
        """Start the thread, or send it to the queue.

        Raises:
            RuntimeError: The system gives no thread.
        """
        if self._bell is not None:
            self._bell.put(None)
            return
        self._bell = queue.SimpleQueue()
        threading.Thread(
            target=self._loop, args=(self._bell,), name="twinkle-blocking", daemon=True
        ).start()

    def _loop(self, bell: queue.SimpleQueue[None]) -> None:
        while True:
            call = self._pool.take(self, None)
            while call is not None:
                call.run()
                call = self._pool.take(self, call)
            try:
                bell.get(timeout=_IDLE_EXIT_S)
            except queue.Empty:
                if self._pool.retire(self):
                    return
                # It has just been woken: the bell comes later, or never after Ctrl-C.


def _deliver(mailbox: Mailbox, waiter: asyncio.Future[Any], call: Future[Any]) -> None:
    """Bring the outcome of a call to the loop that awaits it."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        mailbox.post(_settle, waiter, call)


def _settle(waiter: asyncio.Future[Any], call: Future[Any]) -> None:
    if waiter.done():  # cancelled
        return
    if call.cancelled():
        waiter.cancel()
    elif (error := call.exception()) is not None:
        waiter.set_exception(error)
    else:
        waiter.set_result(call.result())


_default = ThreadPool()
_current: ContextVar[ThreadPool | None] = ContextVar("twinkle_thread_pool", default=None)


def current_pool() -> ThreadPool:
    """Return the pool of the running rollout, else the one shared by the process."""
    return _current.get() or _default


def use_pool(pool: ThreadPool) -> contextvars.Token[ThreadPool | None]:
    """Make `run_blocking` take `pool` in the current context (a task and its children)."""
    return _current.set(pool)


async def run_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in the current pool and await its result; errors as `ThreadPool.run`.

    Cancellation abandons the call: the awaiting task goes on at once, the thread ends when it can.
    """
    return await current_pool().run(function, *args, **kwargs)
