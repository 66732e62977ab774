from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from twinkle_isolation import Launcher, Limits, Sandbox, SandboxSpec

SMALL = SandboxSpec(
    env={"FROM_SPEC": "yes"},
    limits=Limits(memory_bytes=96 << 20, processes=24, disk_bytes=16 << 20, open_files=64),
)


@pytest.fixture(params=["bubblewrap", "process"])
async def launcher(request: pytest.FixtureRequest) -> AsyncIterator[Launcher]:
    async with Launcher(isolation=request.param) as launcher:
        yield launcher


@pytest.fixture
async def jailed() -> AsyncIterator[Launcher]:
    async with Launcher(isolation="bubblewrap") as launcher:
        yield launcher


@pytest.fixture
async def sandbox(launcher: Launcher) -> AsyncIterator[Sandbox]:
    async with await launcher.create(SMALL) as sandbox:
        yield sandbox
