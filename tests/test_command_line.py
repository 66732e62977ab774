"""The command line as a user runs it: real processes, real servers, exit codes."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.rollout.testing import ServerProcess, free_port

pytestmark = pytest.mark.integration

CLI = [sys.executable, "-m", "twinkle_agentic.rollout.cli"]


def cli(*arguments: str, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200"},
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_quickstart_scores_all_tasks_and_leaves_nothing_running(tmp_path: Path) -> None:
    done = cli("quickstart", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = rows(tmp_path / "runs/quickstart/trajectories.jsonl")
    assert len(result) == 32
    assert sum(row["reward"] for row in result) == 27
    assert {row["stop_reason"] for row in result} == {"env_done", "stop", "max_turns"}
    assert max(row["turns"] for row in result if row["stop_reason"] == "env_done") == 2
    assert len(list((tmp_path / "runs/quickstart/traces").iterdir())) == 32
    for url in re.findall(r"http://127\.0\.0\.1:(\d+)", done.stdout):
        assert not listening(int(url))


def test_quickstart_against_a_misbehaving_endpoint_accounts_for_every_trajectory(
    tmp_path: Path,
) -> None:
    done = cli("quickstart", "--faults", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    result = rows(tmp_path / "runs/quickstart/trajectories.jsonl")
    assert len(result) == 32
    for row in result:
        failed = row["stop_reason"] in ("api_error", "env_error")
        assert (row["reward"] is None) == failed
        assert bool(row["error"]) or not failed
    assert done.returncode == int(any(row["reward"] is None for row in result))


def test_run_takes_the_users_tasks_and_environment(
    tmp_path: Path, scripted_endpoint: ServerProcess
) -> None:
    (tmp_path / "my_env.py").write_text(
        textwrap.dedent("""
            from twinkle_agentic.envs.base import Env, StepResult

            class Echo(Env):
                def reset(self, trajectory=None):
                    return StepResult(observation="ready")

                def step(self, tool_name, arguments):
                    return StepResult(observation=str(arguments), reward=0.5, done=True)

                def tools(self):
                    function = {"name": "submit_solution", "parameters": {"type": "object"}}
                    return [{"type": "function", "function": function}]

            def make(trajectory):
                return Echo()
        """)
    )
    prompt = "Write a Python function `add(a, b)` that adds."
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps({"id": "one", "prompt": prompt, "user_data": {"answer": 42}}) + "\n"
    )
    done = cli(
        *("run", "tasks.jsonl", "--env", "my_env:make", "--model", "scripted-policy"),
        *("--model-url", f"{scripted_endpoint.url}/v1", "--out", "out"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "out/trajectories.jsonl")
    assert (row["id"], row["reward"], row["stop_reason"]) == ("one", 0.5, "env_done")
    assert row["user_data"] == {"answer": 42}
    again = cli(
        *("run", "tasks.jsonl", "--env", "my_env:make", "--model", "scripted-policy"),
        *("--model-url", f"{scripted_endpoint.url}/v1", "--out", "out"),
        cwd=tmp_path,
    )
    assert again.returncode == 2
    assert "--overwrite" in again.stderr


def test_run_against_the_coding_server_scores_by_the_tests(
    tmp_path: Path, scripted_endpoint: ServerProcess, coding_server: ServerProcess
) -> None:
    prompt = "Write a Python function `add(a, b)` that adds."
    good = {"id": "good", "prompt": prompt, "tests": "assert add(1, 2) == 3"}
    bad = {"id": "bad", "prompt": prompt, "tests": "assert add(1, 2) == 4"}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    done = cli(
        *("run", "tasks.jsonl", "--env", "coding_env", "--base-url", coding_server.url),
        *("--model", "scripted-policy", "--model-url", f"{scripted_endpoint.url}/v1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = {row["id"]: row for row in rows(tmp_path / "runs/latest/trajectories.jsonl")}
    assert (result["good"]["reward"], result["bad"]["reward"]) == (1.0, 0.0)


def test_run_goes_on_with_the_servers_that_serve(
    tmp_path: Path, scripted_endpoint: ServerProcess, coding_server: ServerProcess
) -> None:
    prompt = "Write a Python function `add(a, b)` that adds."
    task = {"id": "good", "prompt": prompt, "tests": "assert add(1, 2) == 3"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    dead = f"http://127.0.0.1:{free_port()}"
    done = cli(
        *("run", "tasks.jsonl", "--env", "coding_env", "--samples", "4"),
        *("--base-url", dead, "--base-url", coding_server.url),
        *("--model", "scripted-policy", "--model-url", f"{scripted_endpoint.url}/v1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert f"the OpenEnv server at {dead} does not serve" in done.stdout
    results = rows(tmp_path / "runs/latest/trajectories.jsonl")
    assert [row["reward"] for row in results] == [1.0] * 4


REFUSALS = [
    (["absent.jsonl", "--env", "json:dumps"], "cannot read the tasks"),
    (["bad.jsonl", "--env", "json:dumps"], "unknown column 'promt'"),
    (["good.jsonl", "--env", "no_such_module:f"], "cannot import 'no_such_module'"),
    (["good.jsonl", "--env", "no_such_module:x"], "--env no_such_module:x: cannot import"),
    (["good.jsonl", "--env", "json:nothing"], "no callable 'nothing'"),
    (["good.jsonl", "--env", "json:JSONDecoder"], "is no Env"),
    (["good.jsonl", "--env", "coding_env"], "needs --base-url"),
    (["good.jsonl", "--env", "coding_env", "--base-url", "ftp://x"], "ftp://x"),
    (["good.jsonl", "--env", "coding_env", "--base-url", "DEAD"], "needs the column 'tests'"),
    (["tests.jsonl", "--env", "coding_env", "--base-url", "DEAD"], "OpenEnv server"),
    (["good.jsonl", "--env", "json:dumps"], "model endpoint"),
    (["good.jsonl", "--env", "json:dumps", "--concurrency", "0"], "concurrency"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_a_wrong_input_is_one_clear_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "good.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "tests.jsonl").write_text('{"prompt": "x", "tests": "assert 1"}\n')
    (tmp_path / "bad.jsonl").write_text('{"promt": "x"}\n')
    before = sorted(tmp_path.iterdir())
    arguments = [dead if a == "DEAD" else a for a in arguments]
    done = cli("run", *arguments, "--model", "m", "--model-url", f"{dead}/v1", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert [p for p in sorted(tmp_path.iterdir()) if p.name != "__pycache__"] == before


@pytest.mark.parametrize("command", ["quickstart", "run", "doctor"])
def test_help_names_the_options(command: str, tmp_path: Path) -> None:
    done = cli(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--" in done.stdout


@pytest.mark.parametrize("command", ["quickstart", "run", "doctor", "sweep"])
def test_help_at_80_columns_cuts_nothing(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLI, command, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0
    assert "…" not in done.stdout


def test_ctrl_c_keeps_what_was_finished_and_stops_the_servers(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*CLI, "quickstart", "--concurrency", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ports: list[int] = []
        for line in process.stdout:
            if ports := [int(p) for p in re.findall(r"http://127\.0\.0\.1:(\d+)", line)]:
                break
        part = tmp_path / "runs/quickstart/trajectories.jsonl.part"
        wait_for_line(part)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert rows(part)
    assert len(ports) == 2
    assert not any(listening(port) for port in ports)


_SLOW = """
import pathlib, time
from twinkle_agentic.envs.base import Env, StepResult

class Slow(Env):
    def reset(self, trajectory=None):
        pathlib.Path("opened").write_text("1\\n")
        return StepResult()

    def step(self, tool_name, arguments):
        time.sleep(60)
        return StepResult()

    def close(self):
        pathlib.Path("closed").touch()

    def tools(self):
        function = {"name": "submit_solution", "parameters": {"type": "object"}}
        return [{"type": "function", "function": function}]
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_closes_its_envs(
    tmp_path: Path, scripted_endpoint: ServerProcess, signum: signal.Signals
) -> None:
    (tmp_path / "slow_env.py").write_text(_SLOW)
    (tmp_path / "t.jsonl").write_text('{"prompt": "Write a Python function `add(a, b)`."}\n')
    model = ["--model", "scripted-policy", "--model-url", f"{scripted_endpoint.url}/v1"]
    with subprocess.Popen(
        [*CLI, "run", "t.jsonl", "--env", "slow_env:Slow", *model],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for_line(tmp_path / "opened")
        process.send_signal(signum)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 128 + signum, errors
    assert (tmp_path / "closed").exists()


def test_run_refuses_what_would_be_scored_wrong(
    tmp_path: Path, scripted_endpoint: ServerProcess, coding_server: ServerProcess
) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "x", "tests": "assert 1"}\n')
    model = ["--model-url", f"{scripted_endpoint.url}/v1", "--base-url", coding_server.url]
    typo = cli("run", "t.jsonl", "--env", "codingenv", "--model", "m", *model, cwd=tmp_path)
    assert (typo.returncode, "does not read the column 'tests'" in typo.stderr) == (2, True)
    absent = cli("run", "t.jsonl", "--env", "coding_env", "--model", "m", *model, cwd=tmp_path)
    assert (absent.returncode, "serves scripted-policy" in absent.stderr) == (2, True)
    model[-1] = scripted_endpoint.url  # healthy, but no OpenEnv server
    other = cli("run", "t.jsonl", "--env", "coding_env", "--model", "m", *model, cwd=tmp_path)
    assert (other.returncode, "a model endpoint answers there" in other.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()


def wait_for_line(path: Path, timeout_s: float = 60) -> None:
    """Wait until a file, which may not be there yet, has a whole line."""
    import time

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return
        select.select([], [], [], 0.02)
    raise AssertionError(f"nothing was written to {path}")


def listening(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


_ABANDON = """
import sys, time
from twinkle_agentic.envs import AgentEnv
env = AgentEnv("base", api_url=sys.argv[1])
env.reset()
print(env.sandbox_id, flush=True)
time.sleep(300)
"""


def test_sweep_ends_what_a_killed_trainer_left(
    tmp_path: Path, sandbox_server: ServerProcess
) -> None:
    url = sandbox_server.url
    with subprocess.Popen(
        [sys.executable, "-c", _ABANDON, url], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        sandbox_id = trainer.stdout.readline().strip()
        assert sandbox_id
        spared = cli("sweep", "--api-url", url, cwd=tmp_path)
        assert "its trainer runs on this host" in spared.stdout
        live = cli("sweep", "--api-url", url, "--include-live", "--dry-run", cwd=tmp_path)
        assert "its trainer runs on this host, and include_live is set" in live.stdout
        trainer.send_signal(signal.SIGKILL)
    dry = cli("sweep", "--api-url", url, "--dry-run", cwd=tmp_path)
    assert sandbox_id in dry.stdout
    assert "would be killed" in dry.stdout
    done = cli("sweep", "--api-url", url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sandbox_id in done.stdout
    again = cli("sweep", "--api-url", url, cwd=tmp_path)
    assert sandbox_id not in again.stdout


def test_doctor_tells_live_servers_from_dead_ones(
    tmp_path: Path, coding_server: ServerProcess, sandbox_server: ServerProcess
) -> None:
    asked = ["--openenv-url", coding_server.url, "--sandbox-url", sandbox_server.url]
    well = cli("doctor", *asked, cwd=tmp_path)
    assert well.returncode == 0, well.stdout
    dead = cli("doctor", *asked, "--model-url", f"http://127.0.0.1:{free_port()}", cwd=tmp_path)
    assert dead.returncode == 1
    assert "model endpoint" in dead.stdout


@pytest.mark.parametrize("command", ["doctor", "run"])
def test_a_model_url_without_its_v1_is_told_so(
    tmp_path: Path, scripted_endpoint: ServerProcess, command: str
) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt": "x"}\n')
    task = ["t.jsonl", "--env", "json:dumps", "--model", "m"] if command == "run" else []
    done = cli(command, *task, "--model-url", scripted_endpoint.url, cwd=tmp_path)
    assert done.returncode == (2 if command == "run" else 1), done.stdout
    assert f"did you mean {scripted_endpoint.url}/v1?" in done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_doctor_says_what_it_found_where_another_kind_of_server_answers(
    tmp_path: Path,
    scripted_endpoint: ServerProcess,
    coding_server: ServerProcess,
    sandbox_server: ServerProcess,
) -> None:
    model = scripted_endpoint.url
    for option, url, found in [
        ("--model-url", coding_server.url, "an OpenEnv server answers there"),
        ("--model-url", sandbox_server.url, "a sandbox server answers there"),
        ("--openenv-url", model, "a model endpoint answers there"),
        ("--openenv-url", f"{model}/v1", "a model endpoint answers there"),
        ("--openenv-url", sandbox_server.url, "a sandbox server answers there"),
        ("--sandbox-url", coding_server.url, "an OpenEnv server answers there"),
        ("--sandbox-url", model, "a model endpoint answers there"),
    ]:
        done = cli("doctor", option, url, cwd=tmp_path)
        assert (done.returncode, found in done.stdout) == (1, True), (option, url, done.stdout)
