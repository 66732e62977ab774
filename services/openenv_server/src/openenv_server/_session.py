"""One session: an environment object, the thread that calls it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

__all__ = ["EnvRaisedError", "EnvSession", "ResetArgumentError", "uncancelled"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_OPENENV_DEFAULTS = "openenv.core.env_server.interfaces"  # its async methods call the others


class EnvRaisedError(Exception):
    """The environment raised; the message is what it said."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.__cause__ = cause


class ResetArgumentError(ValueError):
    """A reset has arguments that the environment does not take."""


class EnvSession:
    """An environment in use by one client.

    Its methods run in a thread of the session; those that it has as `reset_async`, `step_async` and
    `close_async` run on the event loop. A call that is cancelled calls `abort` where the
    environment has it: from another thread than the running call, which it must end.
    """

    def __init__(self, threads: ThreadPoolExecutor | None) -> None:
        self._threads = threads or ThreadPoolExecutor(1, thread_name_prefix="session")
        self._own_threads = threads is None
        self._stack = contextlib.AsyncExitStack()
        self.env: Any = None
        self.steps = 0

    @classmethod
    async def open(
        cls, factory: Callable[[], Any], *, threads: ThreadPoolExecutor | None = None
    ) -> EnvSession:
        """Make the environment.

        Args:
            factory: Makes it; may be asynchronous.
            threads: Run it there, and not in a thread of its own.

        Raises:
            EnvRaisedError: It cannot be made.
        """
        session = cls(threads)
        try:
            made = await session._in_thread(factory)
            session.env = await _guarded(made) if inspect.isawaitable(made) else made
            mcp_session = getattr(session.env, "mcp_session", None)
            if callable(mcp_session):
                manager: Any = mcp_session()
                await session._stack.enter_async_context(manager)
        except BaseException:
            await session.close()
            raise
        return session

    async def reset(self, arguments: dict[str, Any]) -> Any:
        """Start an episode.

        Raises:
            ResetArgumentError: There are arguments it does not take. `seed` and `episode_id` belong
                to the protocol and are left out where it takes none.
            EnvRaisedError: It raised.
        """
        name = "reset_async" if self._is_async("reset_async") else "reset"
        parameters = inspect.signature(getattr(self.env, name)).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            unknown = sorted(arguments.keys() - parameters.keys() - {"seed", "episode_id"})
            if unknown:
                takes = ", ".join(parameters) or "no argument"
                raise ResetArgumentError(f"reset does not take {unknown}: it takes {takes}")
            arguments = {k: v for k, v in arguments.items() if k in parameters}
        return await self._call("reset", **arguments)

    async def step(self, action: Any) -> Any:
        """Take a step.

        Raises:
            EnvRaisedError: It raised.
        """
        self.steps += 1
        return await self._call("step", action)

    async def state(self) -> dict[str, Any]:
        """Return where the episode stands.

        Raises:
            EnvRaisedError: It raised.
        """

        def read() -> dict[str, Any]:
            state = self.env.state
            return state.model_dump() if hasattr(state, "model_dump") else dict(state or {})

        return await self._in_thread(read)

    async def close(self) -> None:
        """End the environment. What it raises then is logged: the client cannot use it."""
        with contextlib.suppress(Exception):
            await self._stack.aclose()
        if self.env is not None and hasattr(self.env, "close"):
            try:
                await self._call("close")
            except EnvRaisedError as error:
                logger.warning("an environment raised when it was closed", exc_info=error.__cause__)
        if self._own_threads:
            self._threads.shutdown(wait=False)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._is_async(f"{name}_async"):
            return await _guarded(getattr(self.env, f"{name}_async")(*args, **kwargs))
        return await self._in_thread(partial(getattr(self.env, name), *args, **kwargs))

    def _is_async(self, name: str) -> bool:
        for cls in type(self.env).__mro__:
            if name in vars(cls):
                return cls.__module__ != _OPENENV_DEFAULTS
        return False

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        def run() -> tuple[Any, BaseException | None]:
            try:
                return function(), None
            except BaseException as error:  # a SystemExit would end the event loop
                return None, error

        try:
            value, error = await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except asyncio.CancelledError:
            abort = getattr(self.env, "abort", None)
            if callable(abort):
                abort()
            raise
        if error is not None:
            raise EnvRaisedError(error)
        return value


async def _guarded(awaitable: Awaitable[_T]) -> _T:
    try:
        return await awaitable
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise EnvRaisedError(error) from error


async def uncancelled(awaitable: Awaitable[_T]) -> _T:
    """Wait to the end, also when cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen
        raise cancelled
    return task.result()
