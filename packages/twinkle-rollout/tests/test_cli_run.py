"""`run` with its guard rails, as a user runs it: real processes, exit codes, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.rollout.testing import ServerProcess, free_port

CLI = [sys.executable, "-m", "twinkle_agentic.rollout.cli", "run"]
ENDPOINT = [sys.executable, "-m", "twinkle_agentic.rollout.cli.scripted_endpoint"]
_FUNCTION: dict[str, Any] = {"name": "submit_solution", "parameters": {}}
TOOL = {"type": "function", "function": _FUNCTION}
_ENV = f"""
import os, pathlib, time
from twinkle_agentic.envs.base import Env, StepResult

class Good(Env):
    def reset(self, trajectory=None):
        with open("played", "a") as file:
            file.write(trajectory["id"] + "\\n")

    def step(self, tool_name, arguments):
        return StepResult("done", reward=1.0, done=True)

    def tools(self):
        return [{TOOL!r}]

class Broken(Good):
    def step(self, tool_name, arguments):
        return StepResult(undefined_name)

def unmade(trajectory):
    return missing_env

class Held(Good):
    def reset(self, trajectory=None):
        super().reset(trajectory)
        pathlib.Path("holding").touch()
        while not os.path.exists("go"):
            time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve tasks and some envs."""
    (tmp_path / "envs.py").write_text(_ENV)
    task = {"prompt": "Write a Python function `add(a, b)` that adds."}
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(task)}\n" * 12)
    return tmp_path


@pytest.fixture(scope="session")
def scripted() -> Generator[str]:
    """The base URL of the scripted endpoint of the packaged tasks."""
    with endpoint() as url:
        yield url


@contextmanager
def endpoint(*options: str, port: int | None = None) -> Generator[str]:
    def command(free: int) -> list[str]:
        return [*ENDPOINT, "--port", str(port or free), *options]

    server = ServerProcess("scripted endpoint", command)
    with server:
        server.port = port or server.port
        server.wait_ready(60)
        yield f"{server.url}/v1"


def arguments(url: str, *options: str, env: str = "Good", model: str = "scripted-policy") -> Any:
    required = ["tasks.jsonl", "--env", f"envs:{env}", "--model", model, "--model-url", url]
    return [*CLI, *required, "--out", "out", *options]


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    (folder / "played").unlink(missing_ok=True)
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=150, env=environment
    )


def rows(folder: Path, name: str = "trajectories.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / name).read_text("utf-8").splitlines()]


def played(folder: Path) -> list[str]:
    file = folder / "played"
    return file.read_text().split() if file.exists() else []


def test_a_run_is_described_by_files_that_give_it_again(folder: Path, scripted: str) -> None:
    (folder / "run.toml").write_text(
        f'tasks = "tasks.jsonl"\nenv = "envs:Good"\nmodel-url = "{scripted}"\nmax_turns = 3\n'
        'model = "other"\ntokens = false\nstop = ["END"]\n[extra_body]\ntop_k = 20\n'
    )
    given = ["--config", "run.toml", "--model", "scripted-policy", "--out", "out", "--top-p", "0.9"]
    done = run(folder, [*CLI, *given])
    assert done.returncode == 0, done.stderr
    assert "twinkle-rollout report out" in done.stdout
    record = json.loads((folder / "out/run.json").read_text())
    assert record["options"]["model_url"] == scripted
    assert record["settings"]["stop"] == ["END"]
    assert "twinkle-rollout" in record["versions"]
    assert record["started"].startswith("20")
    copy = tomllib.loads((folder / "out/config.toml").read_text())
    assert (copy["max_turns"], copy["top_p"], copy["model"]) == (3, 0.9, "scripted-policy")
    again = run(folder, [*CLI, "--config", "out/config.toml", "--resume"])
    assert (again.returncode, played(folder)) == (0, []), again.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_turn = 3", "did you mean 'max_turns'?"),
        ("max_turns = 1.5", "'--max-turns'"),
        ("max_turns = [1]", "must be a single value"),
        ("max_turns = 0", "'--max-turns'"),
        ("max_turns 3", "run.toml"),
    ],
)
def test_a_wrong_config_is_refused(folder: Path, line: str, message: str) -> None:
    (folder / "run.toml").write_text(line)
    done = run(folder, arguments("http://127.0.0.1:1/v1", "--config", "run.toml"))
    assert done.returncode == 2
    assert message in done.stderr


def test_options_reach_the_request(folder: Path, server: str) -> None:
    (folder / "tasks.jsonl").write_text('{"prompt": "Hello"}\n')
    options = ["--stop", "A", "--stop", "B", "--top-p", "0.5", "--tool-choice", "submit_solution"]
    body = ["--extra-body", '{"top_k": 20}']
    done = run(folder, arguments(f"{server}/v1", *options, *body, model="body"))
    assert done.returncode == 0, done.stderr
    asked = json.loads(rows(folder)[0]["messages"][-1]["content"])
    assert (asked["stop"], asked["top_p"], asked["top_k"]) == (["A", "B"], 0.5, 20)
    assert asked["tool_choice"]["function"] == {"name": "submit_solution"}


def test_a_dry_run_plays_one_episode_and_writes_nothing(folder: Path, scripted: str) -> None:
    done = run(folder, arguments(scripted, "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert played(folder) == ["1"]
    assert "reward 1" in done.stdout
    assert not (folder / "out").exists()
    bad = run(folder, arguments(scripted, "--dry-run", env="unmade"))
    assert (bad.returncode, "missing_env" in bad.stdout) == (1, True)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("no_tools", [], "--enable-auto-tool-choice and the --tool-call-parser"),
        ("as_text", [], "left the tool call of 3 replies in the text"),
        ("answer", ["--tokens"], "cannot be trained on: token ids were asked for"),
        ("unknown", [], "no model 'unknown'"),
    ],
)
def test_what_the_endpoint_lacks_is_said_before_the_start(
    folder: Path, server: str, model: str, options: list[str], message: str
) -> None:
    done = run(folder, arguments(f"{server}/v1", *options, model=model))
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert not played(folder)
    assert not (folder / "out").exists()


def test_tokens_that_do_not_come_are_a_failure_of_the_run(folder: Path, server: str) -> None:
    command = arguments(f"{server}/v1", "--tokens", "--no-probe", model="answer")
    done = run(folder, command)
    assert done.returncode == 1, done.stderr
    assert "0 of 12 turns can be trained on" in done.stdout
    good = run(folder, arguments(f"{server}/v1", "--tokens", "--overwrite", model="tokens"))
    assert good.returncode == 0, good.stdout
    assert "12 of 12 turns can be trained on" in good.stdout


@pytest.mark.parametrize("env", ["Broken", "unmade"])
def test_a_fault_of_the_env_stops_the_run(folder: Path, scripted: str, env: str) -> None:
    options = ["--max-same-failures", "3", "--concurrency", "1"]
    done = run(folder, arguments(scripted, *options, env=env))
    assert done.returncode == 1
    assert "stopped: 3 episodes in a row failed alike" in done.stderr
    assert "NameError" in done.stderr
    assert "9 of 12 episodes were not played" in done.stderr
    assert not (folder / "out/trajectories.jsonl").exists()
    on = run(folder, arguments(scripted, "--max-same-failures", "0", "--resume", env=env))
    assert on.returncode == 1
    assert len(rows(folder)) == 12
    assert "NameError" in on.stdout
    (folder / "envs.py").write_text(
        _ENV.replace("StepResult(undefined_name)", "StepResult('', reward=2.0, done=True)").replace(
            "return missing_env", "return Good()"
        )
    )
    mended = run(folder, arguments(scripted, *options, "--resume", env=env))
    assert mended.returncode == 0, mended.stderr
    assert len(played(folder)) == 12  # none was kept with the reward of a broken env


def test_a_server_that_comes_back_costs_no_episode(folder: Path) -> None:
    port = free_port()
    with endpoint(port=port) as url:
        process = subprocess.Popen(
            arguments(url, "--concurrency", "4", env="Held"),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for(folder / "holding")
        except BaseException:
            process.kill()
            raise
    (folder / "go").touch()  # the server has ended
    assert process.stderr is not None
    said = next(line for line in process.stderr if line.startswith("waiting: "))
    assert "Connection refused" in said
    with endpoint(port=port):
        out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, out + errors
    assert "waiting: the server is back" in errors
    assert [row["reward"] for row in rows(folder)] == [1.0] * 12
    assert len(list((folder / "out/traces").iterdir())) == 12
    assert "completed" not in errors


def test_a_server_that_stays_away_stops_the_run(folder: Path) -> None:
    with endpoint() as url:
        process = subprocess.Popen(
            arguments(url, "--concurrency", "4", "--wait-for-server-s", "1", env="Held"),
            cwd=folder,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            wait_for(folder / "holding")
        except BaseException:
            process.kill()
            raise
    (folder / "go").touch()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1, errors
    assert "did not come back within --wait-for-server-s 1" in errors
    assert len(played(folder)) < 12


def test_samples_may_grow(folder: Path, scripted: str) -> None:
    (folder / "tasks.jsonl").write_text(
        '{"id": "add", "prompt": "Write a function `add(a, b)`."}\n'
    )
    for samples, new in ((1, ["add"]), (2, ["add#1"]), (4, ["add#2", "add#3"])):
        done = run(folder, arguments(scripted, "--resume", "--samples", str(samples)))
        assert (done.returncode, sorted(played(folder))) == (0, new), done.stderr
    assert [(row["task"], row["sample"]) for row in rows(folder)] == [
        ("add", number) for number in range(4)
    ]
    fewer = run(folder, arguments(scripted, "--resume", "--samples", "2"))
    assert (fewer.returncode, "--samples 4" in fewer.stderr) == (2, True)


def test_a_script_of_ones_own_is_answered_and_nothing_else(folder: Path) -> None:
    function = {"name": "submit_solution", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    script = {"my number": [{"content": "", "tool_calls": [call]}]}
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "tasks.jsonl").write_text(
        '{"prompt": "Guess my number."}\n{"prompt": "Something else."}\n'
    )
    with endpoint("--script", str(folder / "script.json")) as url:
        done = run(folder, arguments(url))
    assert done.returncode == 1, done.stderr
    known, unknown = rows(folder)
    assert (known["reward"], unknown["reward"]) == (1.0, None)
    assert "the script has no answer" in unknown["error"]


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was never made"
        time.sleep(0.02)
