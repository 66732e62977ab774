from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from sandbox_server.auth import is_loopback

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT_BWRAP = (
    "import twinkle_isolation.jail as jail; jail.find_bwrap = lambda: None; "
    "from sandbox_server.cli import main; main()"
)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sandbox_server", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("a.localhost", True),
        ("", False),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_what_counts_as_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_another_address_wants_a_key() -> None:
    result = run("--host", "0.0.0.0", "--port", "0")
    assert result.returncode != 0
    assert "api-key" in result.stderr


def test_a_missing_share_is_an_error() -> None:
    result = run("--share", "/no/such/place", "--port", "0")
    assert result.returncode != 0
    assert "/no/such/place" in result.stderr


def test_a_data_dir_that_cannot_be_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run("--port", "0", "--data-dir", str(tmp_path / "file"))
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "Not a directory" in " ".join(ran.stderr.replace("│", " ").split())


def test_a_machine_without_bubblewrap_refuses_to_start() -> None:
    command = [sys.executable, "-c", WITHOUT_BWRAP, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "needs the bwrap program" in done.stderr
    assert "no boundary" in done.stderr


def test_isolation_process_is_said_once_and_in_health() -> None:
    command = [sys.executable, "-m", "sandbox_server", "--port", "0", "--isolation", "process"]
    server = subprocess.Popen(
        [*command, "--api-key", "key"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert server.stdout is not None
    assert server.stderr is not None
    url = server.stdout.readline().split()[2]
    log = ""
    while "startup complete" not in log:
        log += server.stderr.readline()
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert b'"isolation":"process"' in answer.read()
    server.send_signal(signal.SIGTERM)
    _, rest = server.communicate(timeout=30)
    assert (log + rest).count("NOT isolated") == 1


def test_the_version_is_that_of_the_distribution() -> None:
    said = run("--host", "0.0.0.0", "--version")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"twinkle-sandbox-server {version('twinkle-sandbox-server')}\n"
