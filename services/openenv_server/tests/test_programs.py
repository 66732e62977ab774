"""Programs against plain `python`: whole, and cut into steps, they print and end the same."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from openenv_server.limits import SessionLimits
from openenv_server.session import Sessions

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROGRAMS = sorted((Path(__file__).parent / "programs" / "same").glob("*.txt"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(SessionLimits(spares=1)) as sessions:
        yield sessions


def _python(code: str, folder: Path) -> tuple[str, int]:
    (folder / "program.py").write_text(code)
    ended = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, cwd=folder, timeout=60
    )
    return ended.stdout, ended.returncode


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
async def test_prints_what_python_prints(program: Path, sessions: Sessions, tmp_path: Path) -> None:
    code = program.read_text()  # noqa: ASYNC240
    expected = await asyncio.to_thread(_python, code, tmp_path)
    result = await sessions.run_fresh(code)
    assert (result.stdout, result.exit_code) == expected
