# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""Servers for the tests, each in a process of its own, started once per test session."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SERVERS = Path(__file__).parent / "servers"


@contextmanager
def running(
    script: str, *arguments: str
) -> Generator[tuple[dict[str, int], subprocess.Popen[str]]]:
    """Run a server script; yields its ports and its process."""
    process = subprocess.Popen(
        [sys.executable, str(SERVERS / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"{script} did not start"
        yield json.loads(line), process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def rude_ports() -> Iterator[dict[str, int]]:
    with running("rude_server.py") as (ports, _):
        yield ports


@pytest.fixture(scope="session")
def openenv_ports() -> Iterator[dict[str, int]]:
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed: it comes with the embedded extra")
    with running("openenv_servers.py") as (ports, _):
        yield ports


@pytest.fixture
def word_game_package(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the word game of the cookbook importable."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed: it comes with the embedded extra")
    monkeypatch.syspath_prepend(
        str(Path(__file__).resolve().parents[3] / "cookbook" / "rl" / "envs")
    )
    return "word_game_env"


@pytest.fixture
def start_rude_server() -> Callable[..., Any]:
    """Start a rude server of one's own, to kill it."""
    return running


@pytest.fixture
def start_servers() -> Callable[..., Any]:
    """Start servers of one's own, to kill them."""
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed: it comes with the embedded extra")
    return running


@pytest.fixture
def rude_url(rude_ports: dict[str, int], request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Make the URL of a behaviour; each test has its own key."""
    key = re.sub(r"\W", "_", request.node.name)
    return lambda behaviour: f"http://127.0.0.1:{rude_ports['rude']}/{behaviour}/{key}"


@pytest.fixture
def rude_stats(
    rude_ports: dict[str, int], request: pytest.FixtureRequest
) -> Callable[[], dict[str, Any]]:
    """Ask the rude server about the sessions of this test."""
    key = re.sub(r"\W", "_", request.node.name)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def stats() -> dict[str, Any]:
        with opener.open(f"http://127.0.0.1:{rude_ports['rude']}/stats", timeout=10) as answer:
            all_of_them = json.load(answer)
        return {
            "open": all_of_them["open"].get(key, 0),
            "all": all_of_them["all"].get(key, 0),
            "proxied": all_of_them["all"].get("proxy CONNECT", 0),
            "hanging": all_of_them["open"].get("hang", 0),
            "headers": all_of_them["headers"].get(key, {}),
            "knocks": all_of_them["knocks"].get(key, 0),
            "held": all_of_them["held"].get(key, 0),
        }

    return stats


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds in another process, at most ten seconds."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.02)

    return wait
