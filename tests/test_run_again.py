"""`twinkle-rollout run` with several samples per task, and again over what an earlier run left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.rollout.testing import ServerProcess

pytestmark = pytest.mark.integration

CLI = [sys.executable, "-m", "twinkle_agentic.rollout.cli"]

# Says which trajectories it was made for; loses those that the file `down` names, those that `once`
# names the first time, and holds those that `held` names.
_ENV = """
import pathlib, time
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import WorkerLostError

def named(file):
    path = pathlib.Path(file)
    return path.read_text().split() if path.exists() else []

class Counting(Env):
    def reset(self, trajectory=None):
        self.name = trajectory["id"]
        with open("played", "a") as file:
            file.write(self.name + "\\n")
        return StepResult()

    def step(self, tool_name, arguments):
        if self.name in named("down"):
            raise WorkerLostError("the node is gone")
        if self.name in set(named("once")) - set(named("was")):
            pathlib.Path("was").write_text(self.name)
            raise WorkerLostError("the node is gone", retryable=True)
        if self.name in named("held"):
            pathlib.Path("holding").touch()
            time.sleep(60)
        return StepResult(reward=float(len(self.name)), done=True)

    def tools(self):
        function = {"name": "submit_solution", "parameters": {"type": "object"}}
        return [{"type": "function", "function": function}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tasks and an env, in the folder that the command runs in."""
    (tmp_path / "counting.py").write_text(_ENV)
    write_tasks(tmp_path, "a", "bb", "ccc")
    return tmp_path


def write_tasks(folder: Path, *names: str) -> None:
    prompt = "Write a Python function `add(a, b)` that adds."
    lines = [json.dumps({"id": name, "prompt": prompt}) + "\n" for name in names]
    (folder / "tasks.jsonl").write_text("".join(lines))


def command(endpoint: ServerProcess, *options: str) -> list[str]:
    return [
        *(*CLI, "run", "tasks.jsonl", "--env", "counting:Counting", "--out", "out"),
        *("--model", "scripted-policy", "--model-url", f"{endpoint.url}/v1", *options),
    ]


def run(
    folder: Path, endpoint: ServerProcess, *options: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the command; returns what it said and the trajectories that it played."""
    played = folder / "played"
    played.unlink(missing_ok=True)
    done = subprocess.run(
        command(endpoint, *options),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done, sorted(played.read_text().split()) if played.exists() else []


def results(folder: Path, name: str = "trajectories.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / name).read_text("utf-8").splitlines()]


def test_samples_of_a_task_are_told_apart_and_belong_together(
    folder: Path, scripted_endpoint: ServerProcess
) -> None:
    done, played = run(folder, scripted_endpoint, "--samples", "2")
    assert done.returncode == 0, done.stderr
    rows = results(folder)
    assert [(r["id"], r["task"], r["sample"], r["reward"]) for r in rows] == [
        ("a#0", "a", 0, 3.0),
        ("a#1", "a", 1, 3.0),
        ("bb#0", "bb", 0, 4.0),
        ("bb#1", "bb", 1, 4.0),
        ("ccc#0", "ccc", 0, 5.0),
        ("ccc#1", "ccc", 1, 5.0),
    ]
    assert played == [r["id"] for r in rows]
    assert "3: 3 with a reward above 0 in some sample, 3 with the same reward in all" in done.stdout


def test_resume_runs_what_has_no_reward_and_keeps_the_rest(
    folder: Path, scripted_endpoint: ServerProcess
) -> None:
    (folder / "down").write_text("bb")
    first, played = run(folder, scripted_endpoint, "--resume")  # with nothing there it starts
    assert (first.returncode, played) == (1, ["a", "bb", "ccc"]), first.stderr
    assert "`run --resume` plays them again" in first.stdout
    before = results(folder)
    assert [row["reward"] for row in before] == [1.0, None, 3.0]
    (folder / "down").unlink()

    refused, played = run(folder, scripted_endpoint)
    assert (refused.returncode, played) == (2, [])
    assert "--resume" in refused.stderr

    second, played = run(folder, scripted_endpoint, "--resume")
    assert (second.returncode, played) == (0, ["bb"]), second.stderr
    assert "2 of 3 trajectories are kept" in second.stdout
    after = results(folder)
    assert [row["reward"] for row in after] == [1.0, 2.0, 3.0]
    assert (after[0], after[2]) == (before[0], before[2])
    traces = {Path(row["trace_path"]).name for row in after}
    assert {path.name for path in (folder / "out/traces").iterdir()} == traces

    third, played = run(folder, scripted_endpoint, "--resume")
    assert (third.returncode, played) == (0, []), third.stderr
    assert results(folder) == after
    assert "warning" not in third.stderr

    with (folder / "counting.py").open("a") as file:
        file.write("# another reward\n")
    changed, _ = run(folder, scripted_endpoint, "--resume")
    assert changed.returncode == 0, changed.stderr
    assert "warning: the file of --env counting:Counting has changed" in changed.stderr


def test_attempts_play_a_lost_episode_again_in_the_same_run(
    folder: Path, scripted_endpoint: ServerProcess
) -> None:
    (folder / "once").write_text("bb")
    done, played = run(folder, scripted_endpoint, "--attempts", "2")
    assert (done.returncode, played) == (0, ["a", "bb", "bb", "ccc"]), done.stderr
    assert "1 of 3 episodes, 4 attempts in all" in done.stdout
    assert [(row["reward"], row["attempts"]) for row in results(folder)] == [
        (1.0, 1),
        (2.0, 2),
        (3.0, 1),
    ]


def test_resume_after_a_kill_takes_up_the_part_file(
    folder: Path, scripted_endpoint: ServerProcess
) -> None:
    (folder / "held").write_text("ccc")
    options = ["--concurrency", "1"]
    process = subprocess.Popen(command(scripted_endpoint, *options), cwd=folder)
    try:
        wait_for(folder / "holding")
    finally:
        process.kill()
        process.wait()
    with (folder / "out/trajectories.jsonl.part").open("a") as file:
        file.write('{"id": "ccc", "rew')  # a kill may come in the middle of a line
    (folder / "held").unlink()
    done, played = run(folder, scripted_endpoint, *options, "--resume")
    assert (done.returncode, played) == (0, ["ccc"]), done.stderr
    assert [row["reward"] for row in results(folder)] == [1.0, 2.0, 3.0]
    assert not (folder / "out/trajectories.jsonl.part").exists()


def test_resume_that_is_interrupted_at_once_loses_nothing(
    folder: Path, scripted_endpoint: ServerProcess
) -> None:
    (folder / "down").write_text("a bb")
    first, _ = run(folder, scripted_endpoint)
    assert first.returncode == 1
    (folder / "down").unlink()
    (folder / "held").write_text("a bb")
    with subprocess.Popen(
        command(scripted_endpoint, "--resume"), cwd=folder, stderr=subprocess.PIPE
    ) as process:
        wait_for(folder / "holding")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert [row["id"] for row in results(folder, "trajectories.jsonl.part")] == ["ccc"]
    (folder / "held").unlink()
    done, played = run(folder, scripted_endpoint, "--resume")
    assert (done.returncode, played) == (0, ["a", "bb"]), done.stderr


def test_resume_refuses_results_that_came_about_otherwise(
    folder: Path, scripted_endpoint: ServerProcess
) -> None:
    first, _ = run(folder, scripted_endpoint)
    assert first.returncode == 0, first.stderr
    before = results(folder)

    hotter, played = run(folder, scripted_endpoint, "--resume", "--temperature", "0.5")
    assert (hotter.returncode, played) == (2, [])
    assert "--temperature 1.0, asked for is 0.5" in hotter.stderr
    both, _ = run(folder, scripted_endpoint, "--resume", "--overwrite")
    assert both.returncode == 2
    write_tasks(folder, "a", "bb", "d")
    others, played = run(folder, scripted_endpoint, "--resume")
    assert (others.returncode, played) == (2, [])
    assert "other tasks" in others.stderr
    write_tasks(folder, "a", "bb", "ccc")
    (folder / "out/run.json").unlink()
    unknown, played = run(folder, scripted_endpoint, "--resume")
    assert (unknown.returncode, played) == (2, [])
    assert "run.json" in unknown.stderr
    assert results(folder) == before


def wait_for(path: Path, timeout_s: float = 60) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists():
            return
        select.select([], [], [], 0.02)
    raise AssertionError(f"{path} was never made")
