"""Settings, bounded text, names and the package itself, without a server."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import openenv_server
from openenv_server.coding_types import CodeAction
from openenv_server.environment import CodingEnvironment
from openenv_server.limits import Failure, SessionLimits
from openenv_server.output import BoundedText
from openenv_server.session import CodeResult
from openenv_server.settings import Settings, SettingsError


def _python(code: str, **env: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
        check=True,
    )
    return ended.stdout


def test_settings_reach_a_worker_as_they_are() -> None:
    settings = Settings(
        max_concurrent_envs=7,
        memory_mb=100,
        step_timeout_s=0.25,
        packages=("numpy",),
        allowed_hosts=("a.example",),
        token=("a-long-secret",),
    )
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_arguments_come_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_CONCURRENT_ENVS", "7")
    assert Settings.load().max_concurrent_envs == 7
    assert Settings.load(max_concurrent_envs="9").max_concurrent_envs == 9


def test_settings_and_their_error_pickle() -> None:
    assert pickle.loads(pickle.dumps(Settings())) == Settings()
    with pytest.raises(SettingsError, match="CODE_ISOLATION is 'x'") as caught:
        Settings.load(isolation="x")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.setting, str(copy)) == ("CODE_ISOLATION", str(caught.value))


def test_result_pickles() -> None:
    result = CodeResult(stdout="a", stderr="b", exit_code=1, failure=Failure.TIMEOUT)
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 12, 100, 1000])
@pytest.mark.parametrize("piece", [1, 3, 10, 1000])
def test_bounded_text_keeps_both_ends(size: int, piece: int) -> None:
    text = "".join(chr(33 + i % 90) for i in range(size))
    kept = BoundedText(10)
    for start in range(0, size, piece):
        kept.add(text[start : start + piece])
    if size <= 10:
        assert kept.text() == text
    else:
        assert kept.text() == f"{text[:5]}\n[{size - 10:,} characters cut]\n{text[-5:]}"


def test_all_names_are_there() -> None:
    for name in openenv_server.__all__:
        assert getattr(openenv_server, name) is not None


def test_importing_the_package_loads_no_openenv() -> None:
    loaded = _python("import sys, openenv_server\nprint('openenv' in sys.modules)")
    assert loaded == "False\n"


def test_the_server_starts_without_gradio_and_leaves_it_importable() -> None:
    loaded = json.loads(
        _python(
            """
            import importlib.util, json, sys
            import openenv_server.app
            print(json.dumps(["gradio" in sys.modules, importlib.util.find_spec("gradio") is None]))
            """
        )
    )
    assert loaded == [False, False]


# The contract of OpenEnv's package, as far as the server relies on it.
CODING_ENV = {
    "__init__.py": "",
    "models.py": """
        from openenv.core.env_server.types import Action, Observation, State
        class CodeAction(Action):
            code: str
        class CodeObservation(Observation):
            stdout: str = ""
            stderr: str = ""
            exit_code: int = 0
        class CodeState(State):
            last_exit_code: int = 0
    """,
    "server/__init__.py": "",
    "server/python_codeact_env.py": """
        from openenv.core.env_server.interfaces import Environment
        from ..models import CodeAction, CodeObservation, CodeState
        PyExecutor = object
        class PythonCodeActEnv(Environment):
            def __init__(self):
                self._executor = PyExecutor()
                self._state = CodeState()
            def reset(self):
                self._state = CodeState(episode_id="made up")
                self._executor = PyExecutor()
                return CodeObservation(reward=0.0)
            def step(self, action):
                assert isinstance(action, CodeAction)
                result = self._executor.run(action.code)
                self._state.step_count += 1
                self._state.last_exit_code = result.exit_code
                return CodeObservation(stdout=result.stdout, stderr=result.stderr, reward=0.5,
                    exit_code=result.exit_code, metadata={"last_code": action.code, "own": 1})
            @property
            def state(self): return self._state
    """,
}


def _write_coding_env(folder: Path, **changed: str) -> None:
    for name, text in {**CODING_ENV, **changed}.items():
        path = folder / "coding_env" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def test_where_coding_env_is_installed_its_environment_is_the_base(tmp_path: Path) -> None:
    _write_coding_env(tmp_path)
    seen = json.loads(
        _python(
            """
            import json
            from openenv_server.environment import CodingEnvironment
            from coding_env.models import CodeAction
            from coding_env.server.python_codeact_env import PythonCodeActEnv
            env = CodingEnvironment()
            env.reset(episode_id="mine")
            ok = env.step(CodeAction(code="print(1)"))
            bad = env.step(CodeAction(code="raise SystemExit(3)"))
            env.close()
            print(json.dumps([issubclass(CodingEnvironment, PythonCodeActEnv),
                CodingEnvironment.SUPPORTS_CONCURRENT_SESSIONS, env.state.episode_id,
                ok.stdout, ok.reward, ok.metadata, bad.exit_code, bad.metadata["failure"]]))
            """,
            PYTHONPATH=str(tmp_path),
        )
    )
    metadata = {"own": 1, "executor": "cpython", "base": "coding_env", "state": "kept"}
    assert seen == [True, True, "mine", "1\n", 0.5, metadata, 3, "exception"]


def test_a_broken_coding_env_is_not_passed_over(tmp_path: Path) -> None:
    _write_coding_env(tmp_path, **{"models.py": "import no_such_module_here"})
    with pytest.raises(subprocess.CalledProcessError) as caught:
        _python("import openenv_server.environment", PYTHONPATH=str(tmp_path))
    assert "no_such_module_here" in caught.value.stderr


def test_environment_runs_without_a_server() -> None:
    env = CodingEnvironment(SessionLimits(spares=0))
    first = env.reset(seed=1, episode_id="a")
    observation = env.step(CodeAction(code="print(1 + 1)"))
    assert (first.stdout, observation.stdout, env.state.step_count) == ("", "2\n", 1)
    assert observation.metadata["state"] == "kept"
    fresh = CodeAction(code="print('fresh')", metadata={"fresh": True, "timeout_s": 1})
    assert env.step(fresh).stdout == "fresh\n"
    assert (env.state.step_count, env.state.episode_id) == (1, "a")
    with pytest.raises(ValueError, match="give a number of seconds above 0"):
        env.step(CodeAction(code="1", metadata={"fresh": True, "timeout_s": "soon"}))
    env.close()
    env.close()


def test_a_lone_surrogate_does_not_cost_the_output() -> None:
    env = CodingEnvironment(SessionLimits(spares=0))
    code = "import sys\nprint('a' + chr(0xD800) + 'b', file=sys.stderr)\nprint('c')"
    step = env.step(CodeAction(code=code))
    env.close()
    assert step.model_dump_json()
    assert (step.stdout, step.stderr, step.exit_code) == ("c\n", "a\\ud800b\n", 0)
