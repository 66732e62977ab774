"""The strict executor against CPython: the same output, or a failed step. Never another value.

`programs/same` holds programs that must print here what they print in CPython; `programs/refused`
those that give some value in CPython which the interpreter cannot give: the step must fail, with
a text, before it prints anything.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from openenv_server.settings import Settings
from openenv_server.strict import StrictExecutor

PROGRAMS = Path(__file__).parent / "programs"
SAME = sorted((PROGRAMS / "same").glob("*.txt"))
REFUSED = sorted((PROGRAMS / "refused").glob("*.txt"))


def _cpython(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<code>", "exec", dont_inherit=True), {"__name__": "__main__"})
    return out.getvalue()


def test_the_programs_are_there() -> None:
    assert len(SAME) > 60
    assert len(REFUSED) > 15


@pytest.mark.parametrize("program", SAME, ids=lambda path: path.stem)
def test_prints_what_cpython_prints(program: Path) -> None:
    code = program.read_text()
    result = StrictExecutor(Settings()).run(code)
    assert (result.stderr, result.stdout) == ("", _cpython(code))


@pytest.mark.parametrize("program", REFUSED, ids=lambda path: path.stem)
def test_fails_rather_than_differ(program: Path) -> None:
    result = StrictExecutor(Settings()).run(program.read_text())
    assert result.exit_code != 0
    assert result.failure is not None
    assert result.stderr
    assert result.stdout == ""
