"""Verdicts of real interpreters: what is a forgery scores nothing, what is right scores."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from twinkle_agentic.envs import verdict
from twinkle_agentic.envs.verdict import CompiledTests, Reason, TaskFaultError, Verdict

_PROGRAMS = runpy.run_path(str(Path(__file__).parent / "verdict_programs.py"))
FORGERIES: dict[str, tuple[str, str]] = _PROGRAMS["FORGERIES"]
CORRECT: dict[str, tuple[str, str]] = _PROGRAMS["CORRECT"]
NEEDED = {name for name in ("pytest", "numpy") if importlib.util.find_spec(name) is None}


def judge(
    folder: Path,
    solution: str | Mapping[str, str],
    tests: str,
    *,
    prompt: str | None = None,
    provides: Iterable[str] = (),
    timeout_s: float = 30,
) -> Verdict:
    """Run a solution as a server would, without its sandbox."""
    compiled = CompiledTests(tests, prompt=prompt, provides=provides)
    program, key = compiled.program(solution, unlink=True)
    file, report = folder / "program.py", folder / "report"
    file.write_text(program)
    ended = ""
    with report.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-I", str(file)],
            pass_fds=[out.fileno()],
            env={**os.environ, "TWINKLE_REPORT_FD": str(out.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            ended = "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind, too
            process.wait()
    assert not file.exists()
    return compiled.read_report(report.read_text("utf-8", "replace"), key, ended=ended)


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_does_not_pass(tmp_path: Path, name: str) -> None:
    found = judge(tmp_path, *FORGERIES[name])
    assert not found.passed
    assert found.reason not in (None, Reason.TASK)
    assert not found.task_fault
    assert found.text


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_solution_passes(tmp_path: Path, name: str) -> None:
    solution, tests = CORRECT[name]
    if any(f"import {module}" in tests for module in NEEDED):
        pytest.skip(f"needs one of {sorted(NEEDED)}, which is not installed")
    found = judge(tmp_path, solution, tests)
    assert found.passed, found
    assert found.reason is None


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("rev('ab') == 'ba'", r"line 1 of the tests: `rev\('ab'\) == 'ba'` compares and does noth"),
        ("assert f(1)\nnot f(2)", "line 2 of the tests: `not f"),
        ("assert f(1)\nf(2) == 4 and f(3) == 9", "line 2"),
        ("def test_f():\n    f(2) == 4", "line 2 of the tests"),
        ("assert x = 1", "line 1 of the tests: no valid Python"),
        ("x = f(2)", "no assert"),
        ("def check():\n    assert f(2)", "nothing calls"),
        (" ", "they are empty"),
    ],
)
def test_tests_that_check_nothing_are_refused_with_their_line(tests: str, message: str) -> None:
    with pytest.raises(TaskFaultError, match=message):
        CompiledTests(tests)


def test_a_comparison_that_should_raise_is_no_lost_assert() -> None:
    CompiledTests("import pytest\nwith pytest.raises(TypeError):\n    f(2) < 'a'")


def test_a_name_that_only_the_tests_know_is_the_tasks_fault(tmp_path: Path) -> None:
    right, misspelt = "def add(a, b): return a + b", "assert ad(2, 3) == 5"
    found = judge(tmp_path, right, misspelt, prompt="Write `add(a, b)`.")
    assert (found.task_fault, found.reason) == (True, Reason.TASK)
    assert "'ad'" in found.text


def test_a_name_that_was_asked_for_is_the_solutions(tmp_path: Path) -> None:
    wrong, tests = "def sub(a, b): return a + b", "assert add(2, 3) == 5"
    found = judge(tmp_path, wrong, tests, prompt="Write `add(a, b)`.")
    assert (found.task_fault, found.reason) == (False, Reason.MISSING_NAME)
    assert judge(tmp_path, wrong, tests).reason is Reason.MISSING_NAME


def test_a_solution_cannot_blame_the_tests(tmp_path: Path) -> None:
    tests = "assert f(2) == 4"
    for solution in (
        "def f(x): raise ModuleNotFoundError(\"No module named 'y' (line 1)\")",
        "def f(x): raise NameError('ad')",
        "class Fixture(Exception): pass\ndef f(x): raise Fixture('the fixtures x')",
        "def f(x): import nonsuch",
    ):
        found = judge(tmp_path, solution, tests)
        assert (found.passed, found.task_fault) == (False, False)


def test_what_the_tests_lack_is_the_tasks_fault(tmp_path: Path) -> None:
    right = "def f(x): return x * x"
    absent = judge(tmp_path, right, "import nonsuch\nassert f(2) == 4")
    assert (absent.task_fault, "'nonsuch'" in absent.text) == (True, True)
    fixture = judge(tmp_path, right, "def test_f(tmp_path):\n    assert f(2) == 4")
    assert (fixture.task_fault, "tmp_path" in fixture.text) == (True, True)


def test_a_builtin_that_is_asked_for_is_the_solutions(tmp_path: Path) -> None:
    solution, tests = "def pow(a, b): return 7", "assert pow(2, 3) == 7"
    assert judge(tmp_path, solution, tests, provides=["pow"]).passed
    assert not judge(tmp_path, solution, tests).passed


def test_the_results_are_told_one_by_one(tmp_path: Path) -> None:
    solution = "def f(x):\n    if x == 5: raise KeyError(x)\n    return x * x if x < 4 else 0"
    tests = (
        "def test_a(): assert f(2) == 4\ndef test_b(): assert f(4) == 16\n"
        "def test_c(): assert f(5) == 25\nassert f(1) == 1\n"
    )
    found = judge(tmp_path, solution, tests)
    assert found.counts() == {
        "passed": ["line 4", "test_a"],
        "failed": ["test_b"],
        "errors": ["test_c"],
    }
    assert (found.passed, found.fraction, found.reason) == (False, 0.5, Reason.FAILED)


def test_a_project_is_judged_by_its_modules(tmp_path: Path) -> None:
    tests = (
        "import unittest\nfrom shapes import area\nclass T(unittest.TestCase):\n"
        "    def test_area(self):\n        self.assertEqual(area(2), 4)\n"
    )
    right = {"shapes.py": "from lib.square import square as area", "lib/square.py": "square = pow"}
    right["lib/square.py"] = "def square(x): return x * x"
    assert judge(tmp_path, right, tests, provides=["shapes"]).passed
    own = {"shapes.py": "def area(x): return 7", "unittest.py": "class TestCase: pass"}
    assert judge(tmp_path, own, tests, provides=["shapes"]).reason is Reason.FAILED
    lost = judge(tmp_path, {"other.py": ""}, tests, provides=["shapes"])
    assert (lost.passed, lost.task_fault) == (False, False)


def test_a_time_out_is_named(tmp_path: Path) -> None:
    found = judge(tmp_path, "while True: pass", "assert f(2) == 4", timeout_s=1)
    assert (found.reason, "timeout" in found.text) == (Reason.LIMIT, True)


def test_a_report_with_another_key_is_no_verdict(tmp_path: Path) -> None:
    compiled = CompiledTests("assert f(2) == 4")
    _, key = compiled.program("")
    _, other = compiled.program("")
    assert key != other
    forged = f"stage tests\nverdict {'0' * 64} {{'stage': 'tests', 'ended': True}}\n"
    assert compiled.read_report(forged, key).reason is Reason.EXITED


def test_a_verdict_travels() -> None:
    found = Verdict(passed=False, reason=Reason.FAILED, text="no")
    assert pickle.loads(pickle.dumps(found)) == found


def test_public_names() -> None:
    assert verdict.__all__ == sorted(verdict.__all__)
    assert all(hasattr(verdict, name) for name in verdict.__all__)


def test_a_star_import_of_the_tests_is_not_asked_of_the_solution(tmp_path: Path) -> None:
    tests = "from math import *\nassert f(sqrt(4)) == 4"
    assert judge(tmp_path, "def f(x): return x * x", tests).passed
