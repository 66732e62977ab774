"""Makes the executor that `CODE_EXECUTOR` names."""

from __future__ import annotations

from collections.abc import Callable

from openenv_server.executor import Executor
from openenv_server.settings import Settings
from openenv_server.stock import StockExecutor
from openenv_server.strict import StrictExecutor

__all__ = ["EXECUTORS", "make_executor"]

EXECUTORS: dict[str, Callable[[Settings, int | None], Executor]] = {
    "strict": lambda settings, seed: StrictExecutor(settings, seed=seed),
    "stock": lambda settings, seed: StockExecutor(settings, seed=seed),
}
"""One entry per name in `settings.EXECUTOR_NAMES`; the second argument is the episode's seed."""


def make_executor(settings: Settings, seed: int | None = None) -> Executor:
    """Make an executor with no names defined.

    Args:
        settings: Which one, and its limits.
        seed: Makes the code's `random` repeatable, where the executor can do that.
    """
    return EXECUTORS[settings.executor](settings, seed)
