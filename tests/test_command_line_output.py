"""What a run says and where: stdout, stderr, a terminal, a pipe that closed, a full disk."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
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


def left_running(mark: str) -> list[str]:
    """The command lines of processes that were started with `MARK=mark` in their environment."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or folder.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_text())
    return found


def to_full_disk(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    with open("/dev/full", "w") as full:
        return subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, **options
        )


def to_closed_pipe(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As `command | head -1`."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes, **options) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(LIMIT_S)
    return subprocess.CompletedProcess(command, process.returncode, "", errors)


def to_nothing(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """As `command >&-`."""
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    return subprocess.run(closing, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, **options)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (to_full_disk, "No space left on device"),
        (to_closed_pipe, "Broken pipe"),
        (to_nothing, "it is closed"),
    ],
)
def test_a_stdout_that_cannot_be_written_costs_the_table_and_no_result(
    tmp_path: Path, run: Any, why: str
) -> None:
    mark = str(tmp_path)
    done = run(QUICKSTART, cwd=tmp_path, env={**os.environ, "MARK": mark})
    assert done.returncode == 74, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("progress: ")]
    assert said == [
        f"error: standard output cannot be written ({why}): the work goes on, and result files are "
        "written"
    ]
    assert len(rows(tmp_path)) == 32
    assert not left_running(mark)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor"], ["run", "--help"]])
def test_no_command_ends_with_a_traceback_for_want_of_a_stdout(
    tmp_path: Path, arguments: list[str]
) -> None:
    done = to_full_disk([*QUICKSTART[:-1], *arguments], cwd=tmp_path)
    assert done.returncode == 74, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "No space left on device" in done.stderr


def test_a_refusal_is_a_refusal_without_a_stdout_too(tmp_path: Path) -> None:
    options = ["--env", "json:dumps", "--model", "m", "--model-url", "http://127.0.0.1:1/v1"]
    done = to_full_disk([*QUICKSTART[:-1], "run", "absent.jsonl", *options], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot read the tasks")


def test_nothing_is_raised_where_stderr_cannot_be_written_either(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            QUICKSTART, cwd=tmp_path, stdout=full, stderr=full, timeout=LIMIT_S, check=False
        )
    assert done.returncode == 74
    assert len(rows(tmp_path)) == 32


def test_a_second_run_in_the_same_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*QUICKSTART, "--concurrency", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        next(line for line in first.stdout if "http://" in line)  # its servers are up
        first.send_signal(signal.SIGSTOP)  # so that it does not end before the second one has begun
        try:
            second = subprocess.run(
                QUICKSTART,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        finally:
            first.send_signal(signal.SIGCONT)
        _, errors = first.communicate(timeout=LIMIT_S)
    assert (first.returncode, second.returncode) == (0, 2), errors + second.stderr
    assert second.stderr.splitlines() == [
        f"error: runs/quickstart is in use by process {first.pid} on {socket.gethostname()}: "
        "choose another --out, or wait until that run has ended"
    ]
    assert len(rows(tmp_path)) == 32
    assert len(list((tmp_path / "runs/quickstart/traces").iterdir())) == 32


def on_a_terminal(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout is a terminal and return what the terminal got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True, **options)
    os.close(theirs)
    seen = b""
    assert process.stderr is not None
    with process:
        with contextlib.suppress(OSError):  # EIO: the last writer has closed it
            while data := os.read(ours, 65536):
                seen += data
        errors = process.stderr.read()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())  # colours and cursor movements
    return subprocess.CompletedProcess(command, process.returncode, text, errors)


def test_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    environment = {**os.environ, "TERM": "xterm-256color"}
    done = on_a_terminal(QUICKSTART, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout
    assert "32 scored, 0 failed" in done.stdout
    assert "progress: " not in done.stdout + done.stderr


def small_files() -> None:
    """As a disk that is full: no file grows beyond this, which the server's metrics just fit in."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_results_that_cannot_be_written_are_shown_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        QUICKSTART,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        preexec_fn=small_files,
    )
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("progress: ")]
    assert said == [
        "error: runs/quickstart/trajectories.jsonl cannot be written (File too large): the "
        "trajectories that could are in runs/quickstart/trajectories.jsonl.part"
    ]
    assert "0.844 over 32 scored of 32" in done.stdout
    part = (tmp_path / "runs/quickstart/trajectories.jsonl.part").read_text("utf-8")
    assert [json.loads(line)["reward"] for line in part.splitlines()[:-1]]
