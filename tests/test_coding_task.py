"""The coding task against the real coding server."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.envs.openenv import CodingTaskEnv
from twinkle_agentic.rollout.testing import ServerProcess
from twinkle_agentic.tools.types import Trajectory

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
PROGRAMS: dict[str, dict[str, tuple[str, str]]] = runpy.run_path(
    str(ROOT / "packages/twinkle-envs-core/tests/verdict_programs.py")
)


@pytest.fixture
def env(coding_server: ServerProcess) -> Iterator[CodingTaskEnv]:
    with CodingTaskEnv(coding_server.url, max_action_bytes=200_000) as env:
        yield env


def task(**data: object) -> Trajectory:
    return {"messages": [], "user_data": {"tests": "assert f(2) == 4", **data}}


def test_the_episode_id_of_the_task_reaches_the_server(env: CodingTaskEnv) -> None:
    env.reset(task(episode_id="task-7", seed=3, answer=42))
    state: Any = env.client.client.state()
    assert (state.get("episode_id") if hasattr(state, "get") else state.episode_id) == "task-7"


def test_a_solution_is_scored_by_its_tests_alone(env: CodingTaskEnv) -> None:
    env.reset(task())
    wrong = env.step("submit_solution", {"code": "def f(x): return x"})
    assert (wrong.reward, wrong.done, wrong.error) == (0.0, False, None)
    assert wrong.observation.startswith("Test line 1 fails: AssertionError")
    broken = env.step("submit_solution", {"code": "def f(x) return x"})
    assert broken.observation.startswith("The solution itself fails:")
    assert (broken.reward, broken.done) == (0.0, False)
    right = env.step("submit_solution", {"code": "def f(x): return x * x"})
    assert (right.reward, right.done) == (1.0, True)


@pytest.mark.parametrize("name", PROGRAMS["FORGERIES"])
def test_a_forgery_scores_0_with_its_reason(env: CodingTaskEnv, name: str) -> None:
    solution, tests = PROGRAMS["FORGERIES"][name]
    env.reset(task(tests=tests))
    found = env.step("submit_solution", {"code": solution})
    assert (found.reward, found.done, found.error) == (0.0, False, None)
    assert "reward_missing" not in found.info
    assert found.info["passed"] is False
    assert found.info["reason"]
    assert env.evaluate([{}]) == [0.0]


@pytest.mark.parametrize("name", PROGRAMS["CORRECT"])
def test_a_correct_solution_in_an_odd_style_scores_1(env: CodingTaskEnv, name: str) -> None:
    solution, tests = PROGRAMS["CORRECT"][name]
    env.reset(task(tests=tests))
    found = env.step("submit_solution", {"code": solution})
    assert (found.reward, found.done, found.info["passed"]) == (1.0, True, True), found


def test_an_earlier_step_does_not_reach_the_tests(env: CodingTaskEnv) -> None:
    env.reset(task())
    spoil = "import builtins\nf = lambda x: x * x\nbuiltins.AssertionError = None"
    env.step("run_python", {"code": spoil})
    found = env.step("submit_solution", {"code": "def g(x): return x"})
    assert (found.reward, found.info["reason"]) == (0.0, "missing_name")


def test_tests_at_fault_give_no_reward(env: CodingTaskEnv) -> None:
    asked: Any = {"messages": [{"role": "user", "content": "Write `add(a, b)`."}]}
    asked["user_data"] = {"tests": "assert ad(2, 3) == 5"}
    env.reset(asked)
    found = env.step("submit_solution", {"code": "def add(a, b): return a + b"})
    assert (found.info["reward_missing"], found.done) == (True, False)
    with pytest.raises(EnvError, match=r"the task is at fault, so there is no reward: .*'ad'"):
        env.evaluate([{}])
    env.reset(task())
    assert env.evaluate([{}]) == [0.0]


def test_partial_gives_the_part_that_passes_once(coding_server: ServerProcess) -> None:
    tests = "assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9\nassert f(4) == 16"
    with CodingTaskEnv(coding_server.url, partial=True) as env:
        env.reset(task(tests=tests))
        solutions = [
            "def f(x): return x * x if x < 3 else 0",
            "def f(x): return x",
            "def f(x): return x * x if x < 4 else 0",
            "def f(x): return x * x",
        ]
        found = [env.step("submit_solution", {"code": code}) for code in solutions]
        assert [result.reward for result in found] == [0.5, 0.0, 0.25, 0.25]
        assert found[0].info["tests"] == {
            "passed": ["line 1", "line 2"],
            "failed": ["line 3", "line 4"],
            "errors": [],
        }


def test_a_time_out_of_the_solution_is_a_0(coding_server: ServerProcess) -> None:
    with CodingTaskEnv(coding_server.url, timeout_s=1.0) as env:
        env.reset(task())
        found = env.step("submit_solution", {"code": "def f(x):\n    while True: pass"})
        assert (found.reward, found.info["reason"], found.error) == (0.0, "limit", None)


def test_running_code_earns_nothing(env: CodingTaskEnv) -> None:
    env.reset(task())
    result = env.step("run_python", {"code": "print(1 + 1)"})
    assert (result.observation, result.reward, result.done) == ("2", 0.0, False)
    assert "episode_reward" not in result.info


def test_a_submission_that_is_too_large_is_the_agents_fault(env: CodingTaskEnv) -> None:
    env.reset(task())
    result = env.step("submit_solution", {"code": "#" * 200_000})
    assert not result.done
    assert "max_action_bytes" in result.observation
    again = env.step("submit_solution", {"code": "def f(x): return x * x"})
    assert (again.reward, again.done) == (1.0, True)


def test_a_lost_session_is_no_score(env: CodingTaskEnv) -> None:
    env.reset(task())
    env.client.close()
    result = env.step("submit_solution", {"code": "def f(x): return x * x"})
    assert result.done
    assert result.info["error_kind"] == "session_lost"


def kill_sandboxes(server_pid: int, stop: threading.Event) -> None:
    """Kill each process in a pid namespace below the server, until `stop` or for 60 s."""
    until = time.monotonic() + 60
    while not stop.wait(0.02) and time.monotonic() < until:
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                if len(lines["NSpid"].split()) > 1 and is_below(int(lines["Pid"]), server_pid):
                    os.kill(int(lines["Pid"]), signal.SIGKILL)


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def test_a_sandbox_that_ends_under_a_solution_is_no_score(coding_server: ServerProcess) -> None:
    with CodingTaskEnv(coding_server.url) as env:
        env.reset(task())
        stop = threading.Event()
        killer = threading.Thread(target=kill_sandboxes, args=(coding_server.pid or 0, stop))
        killer.start()
        try:
            code = "import time\ntime.sleep(2)\ndef f(x): return x * x"
            found = env.step("submit_solution", {"code": code})
        finally:
            stop.set()
            killer.join()
        assert (found.done, found.info["error_kind"]) == (True, "sandbox_lost")
        assert found.info["retryable"]
        env.reset(task())
        found = env.step("submit_solution", {"code": "def f(x): return x * x"})
        assert (found.reward, found.done) == (1.0, True)


def test_a_task_without_tests_is_refused(env: CodingTaskEnv) -> None:
    with pytest.raises(ValueError, match="user_data"):
        env.reset({"messages": []})
