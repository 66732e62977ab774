"""The recipe `cookbook/rl/agents/fix_tests.py`, run as a reader runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "cookbook/rl/agents/fix_tests.py"


@pytest.mark.integration
def test_thirty_two_episodes_are_scored() -> None:
    done = subprocess.run(
        [sys.executable, str(RECIPE)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "A scripted policy plays the model."
    # Every fourth patch is wrong on purpose, once per kind of task in four.
    assert [line.split(maxsplit=1)[1] for line in lines[1:5]] == [
        "8 of 8 episodes scored, mean reward 0.75"
    ] * 4
    assert lines[5:] == ["stop reasons: {'stop': 32}", "first error: none"]


@pytest.mark.integration
def test_without_a_sandbox_server_one_line_says_what_to_install() -> None:
    # A module that is `None` cannot be imported, as one that is not there.
    hidden = (
        "import runpy, sys\n"
        "sys.modules['sandbox_server'] = None\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, str(RECIPE)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "pip install twinkle-sandbox-server" in line
