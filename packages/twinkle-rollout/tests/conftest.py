from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.protocol.retry import RetryPolicy
from twinkle_agentic.tools import FunctionTool, ToolManager


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of the scripted endpoint."""
    script = Path(__file__).with_name("scripted_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin and process.stdout
    try:
        port = int(process.stdout.readline())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def api(server: str) -> Callable[..., OpenAI]:
    """Makes a client whose retries take no time."""

    def make(model: str, **kwargs: Any) -> OpenAI:
        kwargs.setdefault("retry", RetryPolicy(base_delay_s=0.01, max_delay_s=0.02))
        return OpenAI(model, "key", f"{server}/v1", kwargs.pop("client_kwargs", None), **kwargs)

    return make


@pytest.fixture
def stats(server: str) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        with urllib.request.urlopen(f"{server}/stats") as response:
            return json.load(response)

    return read


@pytest.fixture
def echo() -> ToolManager:
    def echo(text: str) -> str:
        """Repeat a text."""
        return f"echo {text}"

    return ToolManager([FunctionTool(echo)])
