"""The coding task of the command line against the real coding server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.rollout.cli.coding_task import CodingTaskEnv
from twinkle_agentic.rollout.testing import ServerProcess
from twinkle_agentic.tools.types import Trajectory

pytestmark = pytest.mark.integration


@pytest.fixture
def env(coding_server: ServerProcess) -> Iterator[CodingTaskEnv]:
    with CodingTaskEnv(coding_server.url, max_action_bytes=10_000) as env:
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
    assert wrong.observation.startswith("A test fails:")
    broken = env.step("submit_solution", {"code": "def f(x) return x"})
    assert broken.observation.startswith("The solution itself fails:")
    assert (broken.reward, broken.done) == (0.0, False)
    right = env.step("submit_solution", {"code": "def f(x): return x * x"})
    assert (right.reward, right.done) == (1.0, True)


@pytest.mark.parametrize(
    ("solution", "tests"),
    [
        ("def f(x):\n    yield x * x", "assert list(f(2)) == [4]"),
        ("import os\ndef f(x): return x * x", "assert f(2) == 4"),
        ("def f(x): return x * x", "import numpy\nassert f(2) == 4"),
    ],
)
def test_what_the_interpreter_cannot_run_is_not_scored_as_wrong(
    env: CodingTaskEnv, solution: str, tests: str
) -> None:
    env.reset(task(tests=tests))
    result = env.step("submit_solution", {"code": solution})
    assert (result.reward, result.done) == (0.0, False)
    assert result.info["reward_missing"] is True
    with pytest.raises(EnvError, match="cannot run the latest solution or its tests"):
        env.evaluate([{}])


def test_a_solution_that_can_be_run_is_scored_after_one_that_cannot(env: CodingTaskEnv) -> None:
    env.reset(task())
    env.step("submit_solution", {"code": "import os\ndef f(x): return x * x"})
    wrong = env.step("submit_solution", {"code": "def f(x): return x"})
    assert "reward_missing" not in wrong.info
    assert env.evaluate([{}]) == [0.0]
    env.step("submit_solution", {"code": "import os"})
    assert env.step("submit_solution", {"code": "def f(x): return x * x"}).reward == 1.0
    assert env.evaluate([{}]) == [0.0]
    env.step("submit_solution", {"code": "import os"})
    env.reset(task())
    assert env.evaluate([{}]) == [0.0]


def test_running_code_earns_nothing(env: CodingTaskEnv) -> None:
    env.reset(task())
    result = env.step("run_python", {"code": "print(1 + 1)"})
    assert (result.observation, result.reward, result.done) == ("2", 0.0, False)
    assert "episode_reward" not in result.info


def test_a_submission_that_is_too_large_is_the_agents_fault(env: CodingTaskEnv) -> None:
    env.reset(task())
    result = env.step("submit_solution", {"code": "#" * 20_000})
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


def test_a_task_without_tests_is_refused(env: CodingTaskEnv) -> None:
    with pytest.raises(ValueError, match="user_data"):
        env.reset({"messages": []})
