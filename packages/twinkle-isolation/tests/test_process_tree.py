"""What a limit ends with a program: all that came from it, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from twinkle_isolation import Sandbox

BASH = ["/bin/bash", "-c"]
WAITS = [
    pytest.param("setsid env -i sleep 300 & sleep 300", id="child"),
    pytest.param("(setsid env -i sleep 300 & sleep 1) & sleep 300", id="child of an ended child"),
    pytest.param("setsid -f env -i bash -c 'sleep 300; :'", id="of a program that has ended"),
    pytest.param(
        "(setsid env -i bash -c 'while :; do sleep .2 & sleep .1; done') & sleep 99", id="forks"
    ),
]


async def wait_for_processes(sandbox: Sandbox, number: int) -> None:
    async with asyncio.timeout(20):
        while (await sandbox.usage()).processes != number:  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("command", WAITS)
async def test_what_a_program_started_ends_at_its_deadline(sandbox: Sandbox, command: str) -> None:
    other = await sandbox.start([*BASH, "sleep 300 & sleep 300"])
    await wait_for_processes(sandbox, 3)
    process = await sandbox.start([*BASH, command], timeout_s=2)
    assert (await process.wait()).reason == "timeout"
    await wait_for_processes(sandbox, 3)
    await other.signal(9)
    await other.wait()


async def test_a_program_that_ends_by_itself_leaves_its_background(sandbox: Sandbox) -> None:
    result = await sandbox.exec([*BASH, "setsid sleep 300 >/dev/null 2>&1 &"], timeout_s=0.5)
    assert result.end.exit_code == 0
    await sandbox.exec([*BASH, "sleep 300"], timeout_s=0.5)
    assert (await sandbox.usage()).processes == 1
