"""What a failed step held is free when it has failed, and not at some later garbage collection."""

from __future__ import annotations

import gc
import resource
from collections.abc import Generator
from pathlib import Path

import pytest

from openenv_server.executor import Executor
from openenv_server.settings import Settings
from openenv_server.stock import StockExecutor
from openenv_server.strict import StrictExecutor

HELD = 200 * 10**6
IN_A_FUNCTION = f"""
def f():
    held = 'y' * {HELD}
    return {{}}[len(held)]
f()
"""
IN_A_HANDLER = f"""
def f():
    held = 'y' * {HELD}
    try:
        return {{}}[len(held)]
    except KeyError as error:
        raise ValueError('again') from error
f()
"""


@pytest.fixture
def no_collection() -> Generator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("make", [StockExecutor, StrictExecutor])
@pytest.mark.parametrize("code", [IN_A_FUNCTION, IN_A_HANDLER])
def test_a_failed_step_keeps_nothing(make: type[StockExecutor | StrictExecutor], code: str) -> None:
    executor: Executor = make(Settings())
    assert executor.run("print('warm')").exit_code == 0
    before = used()
    for _ in range(2):
        result = executor.run(code)
        assert result.exit_code == 1
        assert "y" * 100 not in result.stderr
    assert used() - before < HELD / 2
