"""Where the code of an embedded environment runs.

Most run in the thread of the caller. One that must always see the same thread gets one (shared, as
on a server), and one that is written with coroutines gets an event loop of its own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, cast

from twinkle_agentic.envs.errors import EnvError

__all__ = ["CallerThread", "LoopThread", "Runner", "SharedThread", "method", "runner_for"]


class Runner(Protocol):
    """Runs the methods of one environment."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, await what it returns if that is awaitable, and return the result."""
        ...

    def close(self) -> None:
        """Release the thread."""
        ...


class CallerThread:
    """Runs in the thread of the caller."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return function(*args, **kwargs)

    def close(self) -> None:
        """Do nothing."""


class SharedThread:
    """Runs in one daemon thread that all such environments of the process share."""

    _lock = threading.Lock()
    _mail: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] | None = None

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function in the shared thread and wait for it."""
        cls = type(self)
        future: Future[Any] = Future()
        with cls._lock:
            if cls._mail is None:
                cls._mail = queue.SimpleQueue()
                threading.Thread(
                    target=_serve, args=(cls._mail,), name="twinkle-openenv-shared", daemon=True
                ).start()
            cls._mail.put((future, lambda: function(*args, **kwargs)))
        return future.result()

    def close(self) -> None:
        """Do nothing: the thread serves others."""


class LoopThread:
    """Runs on an event loop in a daemon thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="twinkle-openenv-env", daemon=True
        )
        self._thread.start()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function on the loop, await what it returns, and wait for it."""

        async def work() -> Any:
            try:
                value = function(*args, **kwargs)
                return await value if asyncio.iscoroutine(value) else value
            except (SystemExit, KeyboardInterrupt) as error:  # would end the loop, not this wait
                raise EnvError(f"the environment raised {error!r}") from error

        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and its thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()


def runner_for(env_cls: type) -> Runner:
    """Choose where an environment runs, by what its class says of itself."""
    if getattr(env_cls, "REQUIRES_SINGLE_THREAD_EXECUTOR", False):
        return SharedThread()
    if _overrides_async(env_cls):
        return LoopThread()
    return CallerThread()


def _overrides_async(env_cls: type) -> bool:
    """Whether the environment itself brings `reset_async` or `step_async`, beyond OpenEnv's own."""
    return any(_is_own(env_cls, name) for name in ("reset_async", "step_async"))


def method(env: Any, name: str) -> Callable[..., Any]:
    """Return `reset` or `step`: the async one where there is one, as a server does."""
    return getattr(
        env, f"{name}_async" if _is_own(cast("type[Any]", type(env)), f"{name}_async") else name
    )


def _is_own(env_cls: type, name: str) -> bool:
    function = getattr(env_cls, name, None)
    return function is not None and not str(getattr(function, "__module__", "")).startswith(
        "openenv."
    )


def _serve(mail: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
    while True:
        future, work = mail.get()
        try:
            future.set_result(work())
        except BaseException as error:  # SystemExit of an environment must not end the thread
            future.set_exception(error)
        del future, work
