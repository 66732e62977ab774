"""Hostile code: each is stopped and named, while eight neighbours step and lose nothing."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from openenv_server.limits import SessionLimits
from openenv_server.session import CodeSession, Sessions

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = SessionLimits(
    step_timeout_s=1.5,
    step_cpu_s=20.0,
    interrupt_grace_s=0.3,
    memory_mb=128,
    processes=16,
    disk_mb=8,
    open_files=64,
    max_output_mb=4,
    spares=2,
)
HOSTILE: dict[str, tuple[str, set[str]]] = runpy.run_path(
    str(Path(__file__).with_name("hostile_programs.py"))
)["HOSTILE"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(LIMITS) as sessions:
        yield sessions


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def neighbours(sessions: Sessions) -> AsyncIterator[list[CodeSession]]:
    made = [await sessions.create() for _ in range(8)]
    for number, session in enumerate(made):
        assert (await session.run(f"x, steps = {number}, 0")).exit_code == 0
    yield made
    for session in made:
        await session.close()


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_code_is_named_and_neighbours_go_on(
    sessions: Sessions, neighbours: list[CodeSession], name: str
) -> None:
    code, failures = HOSTILE[name]
    hostile = await sessions.create()
    running = asyncio.create_task(hostile.run(code))
    rounds = 0
    while not running.done() or rounds < 3:
        results = await asyncio.gather(*(one.run("steps += 1\nprint(x)") for one in neighbours))
        assert [r.stdout for r in results] == [f"{number}\n" for number in range(8)]
        assert {r.state for r in results} == {"kept"}
        rounds += 1
    result = await running
    assert result.failure in failures, result
    assert result.stderr
    # A child that was killed may have written to its end.
    assert (await hostile.run("print('again')")).stdout.endswith("again\n")
    await hostile.close()
