"""`run --tokens`: what a trainer of tokens needs is asked for, and is in the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.rollout import training_trace

_ENV = """
from twinkle_agentic.envs.base import Env, StepResult

class Quiet(Env):
    def step(self, tool_name, arguments):
        return StepResult(done=True)

    def tools(self):
        return [{"type": "function", "function": {"name": "end", "parameters": {"type": "object"}}}]
"""


def run(folder: Path, server: str, model: str, *options: str) -> dict[str, Any]:
    (folder / "quiet.py").write_text(_ENV)
    (folder / "tasks.jsonl").write_text('{"prompt": "Hello"}\n')
    done = subprocess.run(
        [
            *(sys.executable, "-m", "twinkle_agentic.rollout.cli", "run", "tasks.jsonl"),
            *("--env", "quiet:Quiet", "--model", model, "--model-url", f"{server}/v1"),
            *("--out", "out", "--no-probe", *options),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == int(model == "body" and "--tokens" in options), done.stderr
    (line,) = (folder / "out/trajectories.jsonl").read_text().splitlines()
    return json.loads(line)


def test_tokens_are_in_the_file_as_a_trainer_reads_them(tmp_path: Path, server: str) -> None:
    row = run(tmp_path, server, "tokens", "--tokens")
    (turn,) = training_trace(row, trajectory_id=row["id"])["turns"]
    assert (turn["prompt_token_ids"], turn["completion_token_ids"]) == ([1, 2, 3], [7, 8])
    assert turn["per_token_logps"] == [-0.5, -0.25]


@pytest.mark.parametrize("tokens", [False, True])
def test_tokens_are_asked_for_where_they_are_wanted(
    tmp_path: Path, server: str, tokens: bool
) -> None:
    row = run(tmp_path, server, "body", *(["--tokens"] if tokens else []))
    asked = json.loads(row["messages"][-1]["content"])
    assert {"return_token_ids", "logprobs"} & set(asked) == (
        {"return_token_ids", "logprobs"} if tokens else set()
    )
    assert ("token_turns" in row) == tokens
