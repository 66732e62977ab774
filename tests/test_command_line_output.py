"""What a run says and where: stdout, stderr, a terminal, a pipe that closed, a full disk."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

QUICKSTART = [sys.executable, "-m", "twinkle_agentic.rollout.cli", "quickstart"]
LIMIT_S = 100


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs/quickstart/trajectories.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def progress_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("progress: ")]


def test_a_run_without_a_terminal_says_on_stderr_how_far_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        QUICKSTART, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    lines = progress_lines(done.stderr)
    assert lines == done.stderr.splitlines()  # and nothing else is on it
    assert lines[0].startswith("progress: 0 of 32 episodes done, 0 scored, 0 failed, ")
    assert lines[-1].startswith("progress: 32 of 32 episodes done, 32 scored, 0 failed, ")
    assert "progress" not in done.stdout
    ended = [int(re.findall(r"\d+", line)[0]) for line in lines]
    assert ended == sorted(ended)
