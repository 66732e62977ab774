"""Programs against plain `python`: whole, and cut into steps, they print and end the same.

`programs/FAMILY.txt` holds the programs of a family, each after a line `=== name`.
"""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from openenv_server.limits import SessionLimits
from openenv_server.session import CodeResult, Sessions

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOLDER = Path(__file__).parent / "programs"


def _programs() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.txt")):
        for block in re.split(r"^=== ", path.read_text(), flags=re.MULTILINE)[1:]:
            name, _, code = block.partition("\n")
            found[f"{path.stem}-{name}"] = code
    return found


PROGRAMS = _programs()
assert len(PROGRAMS) >= 250
assert len({name.partition("-")[0] for name in PROGRAMS}) >= 25


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions(SessionLimits(spares=2)) as sessions:
        yield sessions


def _python(code: str, folder: Path) -> tuple[str, str, int]:
    program = folder / "program.py"
    program.write_text(code)
    # A shell's background job ignores SIGINT, and so would what it starts.
    default = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    starter = f"{default}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    ended = subprocess.run(
        [sys.executable, "-c", starter, program.name],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        timeout=60,
    )
    stderr = ended.stderr.decode().replace(str(program), "<program>")
    return ended.stdout.decode(), stderr, ended.returncode


def _named(stderr: str) -> str:
    return re.sub(r"<step-\d+>", "<program>", stderr)


def _steps(code: str) -> list[str]:
    """Cut a program after each statement; lines that stand in one statement stay together."""
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return [code]
    lines = code.splitlines(keepends=True)
    starts = [
        min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        for node in body
    ]
    cuts = sorted({1, *starts, len(lines) + 1})
    return ["".join(lines[a - 1 : b - 1]) for a, b in pairwise(cuts)]


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_does_what_it_does_in_python(
    name: str, sessions: Sessions, tmp_path: Path
) -> None:
    code = PROGRAMS[name]
    stdout, stderr, exit_code = await asyncio.to_thread(_python, code, tmp_path)
    whole = await sessions.run_fresh(code)
    assert (whole.stdout, _named(whole.stderr), whole.exit_code) == (stdout, stderr, exit_code)

    session = await sessions.create()
    try:
        printed, last = "", CodeResult()
        for step in _steps(code):
            last = await session.run(f"{step}\nNone")  # so that no value is shown
            printed += last.stdout
            if last.failure is not None or last.state == "lost":
                break
        assert last.state == "kept"
        assert (printed, last.exit_code) == (stdout, exit_code)
        assert last.stderr.splitlines()[-1:] == stderr.splitlines()[-1:]
    finally:
        await session.close()
