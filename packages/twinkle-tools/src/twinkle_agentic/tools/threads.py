"""Blocking calls beside an event loop: daemon threads, reused, and given up when they hang.

`concurrent.futures.ThreadPoolExecutor` joins its threads at interpreter exit and lets one call
that never returns take a thread for good. Tools and environments are other people's code, so both
happen.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

logger = logging.getLogger(__name__)

__all__ = ["BlockingCallError", "ThreadPool", "current_pool", "run_blocking", "use_pool"]

P = ParamSpec("P")
T = TypeVar("T")

_IDLE_EXIT_S = 30.0  # an idle thread ends by itself after this long


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
    the call returns, and it never delays the exit of the interpreter. Thread-safe. A forked child
    starts with an empty pool: the calls of the parent stay in the parent.

    Raises:
        ValueError: `max_threads` is below 1.
    """

    def __init__(self, max_threads: int = 256) -> None:
        if max_threads < 1:
            raise ValueError(f"max_threads must be at least 1, found {max_threads}")
        self.max_threads = max_threads
        self._empty()
        _pools.add(self)

    @property
    def abandoned(self) -> int:
        """How many abandoned calls still run, each in a thread beyond `max_threads`."""
        return self._abandoned

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call, or queue it, and return its future.

        The call sees a copy of the caller's context variables. Cancelling the future works until
        the call has started.

        Raises:
            RuntimeError: The system gives no further thread.
        """
        call = _Call(self, function, args, kwargs)
        with self._lock:
            if self._busy >= self.max_threads:
                self._waiting[call] = None
                return call
            self._busy += 1
            worker = self._idle.pop() if self._idle else None
        try:
            self._start(worker, call)
        except RuntimeError:
            self._release()
            raise
        return call

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a blocking call; when the awaiting task is cancelled, the call is abandoned.

        Raises:
            BlockingCallError: The call raised something that an event loop takes for its own.
            RuntimeError: The system gives no further thread.
            Exception: Whatever else the call raises.
        """
        future = self.submit(function, *args, **kwargs)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.abandon(future)
            raise

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
        if count & (count - 1) == 0:  # at 1, 2, 4, 8, ...: a thousand given up at once are no news
            logger.warning("%d abandoned calls still hold a thread each", count)
        self._release()

    def _start(self, worker: _Worker | None, call: _Call) -> None:
        """Give a call, whose place is counted, to an idle worker or a new one."""
        if worker is None:
            _Worker(self, call)
        else:
            worker.give(call)

    def _release(self) -> None:
        """Hand a freed place to the next queued call."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy -= 1
                    return
                call, _ = self._waiting.popitem(last=False)
                worker = self._idle.pop() if self._idle else None
            try:
                self._start(worker, call)
            except RuntimeError as error:
                call.fail(error)
            else:
                return

    def forget(self, call: _Call) -> bool:
        """Take a cancelled call out of the queue; called by the call alone."""
        with self._lock:
            return self._waiting.pop(call, self) is None

    def finished(self, worker: _Worker, call: _Call) -> None:
        """Take back a worker whose call returned; called by the worker alone."""
        with self._lock:
            call.started = False
            self._idle.append(worker)
            if call.abandoned:
                self._abandoned -= 1
                return
        self._release()

    def retire(self, worker: _Worker) -> bool:
        """Let an idle worker end, unless it has just been given a call."""
        with self._lock:
            try:
                self._idle.remove(worker)
            except ValueError:
                return False
            return True

    def _empty(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._waiting: OrderedDict[_Call, None] = OrderedDict()
        self._busy = 0
        self._abandoned = 0


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

    def fail(self, error: BaseException) -> None:
        self._work = None
        if self.set_running_or_notify_cancel():
            self.set_exception(error)

    def run(self) -> None:
        self.started = True  # before the state changes, so that `abandon` cannot miss it
        if not self.set_running_or_notify_cancel() or self._work is None:
            return
        work, self._work = self._work, None
        result, error = _outcome(*work)
        del work
        if error is None:
            self.set_result(result)
        else:
            self.set_exception(error)
            # The traceback keeps this frame, the frame this future, the future the traceback.
            del self, error


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
                call = self._mail.get()  # given between the two lines above
            call.run()
            self._pool.finished(self, call)
            del call  # an idle thread must not keep a result alive


_pools: WeakSet[ThreadPool] = WeakSet()
_default = ThreadPool()
_current: ContextVar[ThreadPool | None] = ContextVar("twinkle_thread_pool", default=None)


def current_pool() -> ThreadPool:
    """Return the pool of the running rollout, else the one shared by the process."""
    return _current.get() or _default


def use_pool(pool: ThreadPool) -> contextvars.Token[ThreadPool | None]:
    """Make `run_blocking` take `pool` in the current context (a task and its children)."""
    return _current.set(pool)


async def run_blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in the current pool and await its result; errors as `ThreadPool.run`.

    Cancellation abandons the call: the awaiting task goes on at once, the thread ends when it can.
    """
    return await current_pool().run(function, *args, **kwargs)


def _empty_after_fork() -> None:
    for pool in list(_pools):
        pool._empty()  # pyright: ignore[reportPrivateUsage]  # the threads stayed in the parent


os.register_at_fork(after_in_child=_empty_after_fork)
