"""The recipe `cookbook/rl/agents/fix_tests.py`, run as a reader runs it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.verdict import CompiledTests, Reason, Verdict
from twinkle_agentic.rollout.testing import ServerProcess

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "cookbook/rl/agents/fix_tests.py"
PROGRAMS: dict[str, dict[str, tuple[str, str]]] = runpy.run_path(
    str(ROOT / "packages/twinkle-envs-core/tests/verdict_programs.py")
)
JUDGE: Any = runpy.run_path(str(RECIPE))["judge"]


def judged(server: ServerProcess, kind: str, name: str) -> Verdict:
    """Judge a program as the recipe does: a module of a project, in a sandbox of its own."""
    solution, tests = PROGRAMS[kind][name]
    names = [n for n in CompiledTests(tests).names if n != "count"]
    tests = f"from work import {', '.join(names)}\n{tests.replace('count ==', 'work.count ==')}"
    if "work.count" in tests:
        tests = f"import work\n{tests}"
    project = {"work.py": solution}
    found: Verdict = JUDGE(
        project, tests, task="work", arguments={"api_url": server.url, "template": "base"}
    )
    return found


@pytest.mark.integration
@pytest.mark.parametrize("name", PROGRAMS["FORGERIES"])
def test_a_forgery_does_not_pass(sandbox_server: ServerProcess, name: str) -> None:
    found = judged(sandbox_server, "FORGERIES", name)
    assert not found.passed
    assert found.reason not in (None, Reason.TASK)


@pytest.mark.integration
@pytest.mark.parametrize("name", PROGRAMS["CORRECT"])
def test_a_correct_solution_passes(sandbox_server: ServerProcess, name: str) -> None:
    found = judged(sandbox_server, "CORRECT", name)
    if "not installed" in found.text or "No module named 'numpy'" in found.text:
        pytest.skip(f"in the sandbox: {found.text}")
    assert found.passed, found


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
