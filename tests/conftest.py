"""Servers that several tests share: real processes on free ports, one each for the session."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinkle_agentic.rollout.testing import ServerProcess

ROOT = Path(__file__).parents[1]
CODE_PACKAGES = [name for name in ("numpy", "pytest") if importlib.util.find_spec(name)]
"""What the code of sessions may import of this environment, as programs of the tests do."""


@pytest.fixture(scope="session")
def coding_server() -> Iterator[ServerProcess]:
    """The coding server, with room for many sessions."""
    with ServerProcess(
        "coding server",
        lambda port: [sys.executable, "-m", "openenv_server", "--port", str(port)],
        env={"MAX_CONCURRENT_ENVS": "256", "CODE_PACKAGES": ",".join(CODE_PACKAGES)},
    ) as server:
        server.wait_ready(90)
        yield server


@pytest.fixture(scope="session")
def scripted_endpoint() -> Iterator[ServerProcess]:
    """A chat-completions endpoint with the scripted policy of the packaged coding tasks."""
    module = "twinkle_agentic.rollout.cli.scripted_endpoint"
    with ServerProcess(
        "scripted endpoint", lambda port: [sys.executable, "-m", module, "--port", str(port)]
    ) as server:
        server.wait_ready(30)
        yield server


@pytest.fixture(scope="session")
def sandbox_server() -> Iterator[ServerProcess]:
    """The local sandbox server, without a key."""
    with ServerProcess(
        "sandbox server",
        lambda port: [sys.executable, "-m", "sandbox_server", "--port", str(port)],
    ) as server:
        server.wait_ready(60)
        yield server
