"""Results that may have to be awaited: tools that are coroutines, called from either side."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any

from twinkle_agentic.tools.threads import BlockingCallError, current_pool

__all__ = ["finish", "finish_async", "is_cancelled", "is_ctrl_c", "is_told_to_end", "let_go"]

_let_go: set[asyncio.Future[Any]] = set()


def finish(result: Any) -> Any:
    """Return a result; an awaitable is run to its end first, on an event loop of its own."""
    if not inspect.isawaitable(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_await(result))
    # This thread runs a loop already, and a second one cannot run inside it.
    return current_pool().submit(lambda: asyncio.run(_await(result))).result()


async def finish_async(result: Any) -> Any:
    """Return a result; an awaitable is awaited first, and so is what that gives.

    Raises:
        BlockingCallError: It raised what would end the event loop; `__cause__` holds it.
        Exception: Whatever else it raised.
    """
    try:
        while inspect.isawaitable(result):
            result = await result
        return result
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise BlockingCallError(f"the call raised {type(error).__name__}") from error


def is_cancelled() -> bool:
    """Tell whether the running task is being cancelled.

    A `CancelledError` may also come out of something awaited that was cancelled for itself.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_ctrl_c(error: BaseException) -> bool:
    """Tell whether an exception means that the user wants to end it all.

    Ctrl-C arrives in the main thread. In any other one a `KeyboardInterrupt` is a failure of the
    code that raised it, and nobody else's.
    """
    main = threading.current_thread() is threading.main_thread()
    return main and isinstance(error, KeyboardInterrupt)


def is_told_to_end(error: BaseException) -> bool:
    """Tell whether an exception ends the running task, by Ctrl-C or a cancellation of it.

    Any other one is the failure of a part, and need not cost the whole.
    """
    return is_ctrl_c(error) or is_cancelled()


def let_go(task: asyncio.Future[Any]) -> None:
    """Cancel a task and leave it alone: it may take its time, and its exception is nobody's."""
    task.cancel()
    _let_go.add(task)  # the event loop holds tasks weakly
    task.add_done_callback(_ended)


def _ended(task: asyncio.Future[Any]) -> None:
    _let_go.discard(task)
    if not task.cancelled():
        task.exception()


async def _await(result: Awaitable[Any]) -> Any:
    return await result
