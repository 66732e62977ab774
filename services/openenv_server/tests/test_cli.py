"""The command line and bad settings: refused at the start, with the name of the setting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from openenv_server.settings import Settings, SettingsError

LIMIT_S = 60


def _run(
    arguments: list[str], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        check=False,
    )


BAD = [
    ("MAX_CONCURRENT_ENVS", "0"),
    ("MAX_CONCURRENT_ENVS", "-3"),
    ("MAX_CONCURRENT_ENVS", "many"),
    ("MAX_CONCURRENT_ENVS", "2.5"),
    ("CODE_ISOLATION", "docker"),
    ("CODE_STEP_TIMEOUT_S", "nan"),
    ("CODE_STEP_TIMEOUT_S", "0"),
    ("CODE_STEP_TIMEOUT_S", "soon"),
    ("CODE_MAX_OUTPUT_CHARS", "10"),
    ("CODE_MAX_CODE_CHARS", "1e6"),
    ("CODE_MEMORY_MB", "1"),
    ("ALLOWED_HOSTS", "http://env.example:8000"),
]


@pytest.mark.parametrize(("setting", "value"), BAD)
def test_bad_setting_is_named(setting: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting, value)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert caught.value.setting == setting
    assert setting in str(caught.value)
    assert value.split(";")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("MAX_CONCURRENT_ENVS", "many"), ("CODE_PROCESSES", "1"), ("CODE_PACKAGES", "nonsuchpkg")],
)
def test_bad_setting_ends_the_command_with_one_line(setting: str, value: str) -> None:
    ended = _run(["twinkle-openenv-server", "--port", "0"], {setting: value})
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert setting in line
    assert value in line


def test_bad_option_is_refused_like_its_variable() -> None:
    ended = _run(["twinkle-openenv-server", "--max-concurrent-envs", "0"])
    assert ended.returncode == 2
    assert "MAX_CONCURRENT_ENVS is '0'" in ended.stderr


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--log-level", "loud"]])
def test_bad_arguments_exit_with_2(arguments: list[str]) -> None:
    ended = _run(["twinkle-openenv-server", *arguments])
    assert ended.returncode == 2
    assert arguments[0] in ended.stderr


def test_uvicorn_with_a_bad_setting_ends_with_its_name() -> None:
    ended = _run(
        ["uvicorn", "openenv_server.app:app", "--port", "0"], {"MAX_CONCURRENT_ENVS": "none"}
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "openenv_server: MAX_CONCURRENT_ENVS is 'none': set it to a whole number from 1 to 100000 "
        "(--max-concurrent-envs)"
    ]


def test_help_names_every_setting() -> None:
    ended = _run(["twinkle-openenv-server", "--help"])
    assert ended.returncode == 0
    for setting, _ in BAD:
        assert setting in ended.stdout
    assert "uvicorn openenv_server.app:app" in ended.stdout


def test_interrupt_ends_the_server(serve: Any, command: list[str]) -> None:
    with serve(command) as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(LIMIT_S) in (0, 130, -signal.SIGINT)


def test_the_version_is_that_of_the_distribution() -> None:
    said = _run(["twinkle-openenv-server", "--version"], {"MAX_CONCURRENT_ENVS": "many"})
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == f"twinkle-openenv-server {version('twinkle-openenv-server')}\n"


def test_logs_that_are_not_read_hold_nothing_up() -> None:
    """Standard error is a pipe of 64 KiB that is not read."""
    code = """
import logging
from openenv_server._logs import configure_logs, flush_logs
configure_logs("info")
for number in range(20_000):
    logging.info("line %d %s", number, "x" * 100)
flush_logs()
print("ended", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ended\n"
    finally:
        process.kill()
        process.communicate()
