"""From whatever event loop the caller runs to the shared background loop and back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from twinkle_agentic._aio.loop import background_loop

__all__ = ["on_background"]

T = TypeVar("T")


async def on_background(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that runs on the background loop; cancelling the caller cancels it too."""
    loop = background_loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
