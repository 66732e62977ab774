"""One client, several coding servers: sessions are spread, and go on when a server does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from twinkle_agentic.envs.errors import CapacityError, SessionClosedError
from twinkle_agentic.envs.openenv import OpenEnvClient

pytestmark = pytest.mark.integration

LIMIT_S = 60.0
TOKEN = "a-secret-of-the-tests"


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    reader: threading.Thread

    def wait_ended(self) -> None:
        """Wait for the main process and its workers, which hold standard error too."""
        self.process.wait(LIMIT_S)
        self.reader.join(LIMIT_S)
        assert not self.reader.is_alive()

    def capacity(self) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/capacity", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)


@contextlib.contextmanager
def serving(*options: str) -> Generator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "openenv_server", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENENV_SERVER_TOKEN": TOKEN},
    )
    assert process.stderr is not None
    stderr = process.stderr
    url = ""
    for line in stderr:
        url = url or "".join(re.findall(r"running on (\S+)", line))
        if "startup complete" in line:
            break
    reader = threading.Thread(target=stderr.read)
    reader.start()
    try:
        yield Server(process, url, reader)
    finally:
        process.kill() if process.poll() is None else None
        process.wait(LIMIT_S)
        reader.join(LIMIT_S)
        stderr.close()


@contextlib.contextmanager
def two(*options: str) -> Generator[tuple[Server, Server]]:
    with serving(*options) as one, serving(*options) as other:
        yield one, other


def client(*servers: Server, **options: Any) -> OpenEnvClient:
    urls = [server.url for server in servers]
    return OpenEnvClient(env_name="coding_env", base_url=urls, token=TOKEN, **options)


def test_sessions_are_spread_by_free_capacity() -> None:
    with (
        serving("--max-concurrent-envs", "6") as large,
        serving("--max-concurrent-envs", "2") as small,
        contextlib.ExitStack() as stack,
    ):
        for number in range(8):
            env = stack.enter_context(client(large, small))
            env.reset()
            env.step("run_python", {"code": f"x = {number}"})
        assert large.capacity()["sessions"] == 6
        assert small.capacity()["sessions"] == 2


def test_more_episodes_than_both_have_room_for_all_complete() -> None:
    with two("--max-concurrent-envs", "2") as servers:

        async def episode(number: int) -> str:
            env = client(*servers)
            try:
                await env.areset()
                return (await env.astep("run_python", {"code": f"print({number})"})).observation
            finally:
                await env.aclose()

        async def play() -> list[str]:
            return await asyncio.gather(*(episode(n) for n in range(16)))

        assert asyncio.run(play()) == [str(n) for n in range(16)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_loses_its_sessions_and_no_other(how: signal.Signals) -> None:
    options = ["--max-concurrent-envs", "8", "--drain-timeout-s", "0"]
    with two(*options) as (one, other), contextlib.ExitStack() as stack:
        envs = [stack.enter_context(client(one, other)) for _ in range(6)]
        for number, env in enumerate(envs):
            env.reset()
            env.step("run_python", {"code": f"x = {number}"})
        assert one.capacity()["sessions"] == other.capacity()["sessions"] == 3
        one.process.send_signal(how)
        one.wait_ended()
        seen: Counter[str] = Counter()
        for number, env in enumerate(envs):
            result = env.step("run_python", {"code": "print(x)"})
            if result.done:  # said, and never a fresh session unasked
                assert result.info["error_kind"] == "session_lost"
                env.reset()
                assert "NameError" in env.step("run_python", {"code": "print(x)"}).observation
            else:
                assert result.observation == str(number)
            seen["lost" if result.done else "kept"] += 1
        assert seen == {"lost": 3, "kept": 3}
        assert other.capacity()["sessions"] == 6


def test_a_server_that_drains_keeps_its_sessions_and_gets_no_more() -> None:
    with two("--max-concurrent-envs", "4", "--drain-timeout-s", "60") as (one, other):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(client(one))
            first.reset()
            first.step("run_python", {"code": "x = 41"})
            one.process.send_signal(signal.SIGTERM)
            for _ in range(4):
                stack.enter_context(client(one, other)).reset()
            assert other.capacity()["sessions"] == 4
            assert first.step("run_python", {"code": "print(x + 1)"}).observation == "42"
        one.wait_ended()


def test_a_server_that_was_never_there_is_passed_over() -> None:
    with serving() as there, contextlib.ExitStack() as stack:
        absent = Server(there.process, "http://127.0.0.1:1", there.reader)
        for _ in range(3):
            stack.enter_context(client(absent, there)).reset()
        assert there.capacity()["sessions"] == 3
        with pytest.raises(SessionClosedError, match=r"cannot (connect|reach)"):
            client(absent).reset()


def test_no_room_anywhere_is_a_refusal_in_time() -> None:
    options = ["--max-concurrent-envs", "1", "--queue-timeout-s", "60"]
    with two(*options) as servers, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(client(*servers)).reset()
        with pytest.raises(CapacityError, match=r"http\S+, http\S+ within"):
            client(*servers, capacity_timeout_s=0.5).reset()
        with pytest.raises(CapacityError, match="capacity_timeout_s=0 "):
            client(servers[0], capacity_timeout_s=0).reset()


def test_a_wrong_token_is_an_error_that_says_so() -> None:
    with serving() as server:
        env = OpenEnvClient(env_name="coding_env", base_url=server.url, token="something else")
        with pytest.raises(SessionClosedError, match=r"HTTP 401.*token"):
            env.reset()
