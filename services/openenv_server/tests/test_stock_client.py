"""OpenEnv's own client against the server."""

from __future__ import annotations

from typing import Any

import pytest
from openenv.core.generic_client import GenericEnvClient


def _client(server: Any) -> Any:
    client: Any = GenericEnvClient(base_url=server.url)  # untyped in openenv
    return client.sync()


def test_stock_client_runs_an_episode(server: Any) -> None:
    with _client(server) as env:
        first = env.reset(seed=1, episode_id="stock")
        assert first.observation["stdout"] == ""
        assert env.step({"code": "x = [1, 2]\nprint(sum(x))"}).observation["stdout"] == "3\n"
        failed = env.step({"code": "print('a')\nx[9]"})
        assert failed.observation["stdout"] == "a\n"
        assert failed.observation["stderr"].endswith("IndexError: list index out of range\n")
        assert failed.observation["exit_code"] == 1
        assert failed.done is False
        state = env.state()
    assert (state["episode_id"], state["step_count"], state["last_exit_code"]) == ("stock", 2, 1)


def test_stock_client_keeps_its_session_when_the_code_exits(server: Any) -> None:
    with _client(server) as env:
        env.reset()
        env.step({"code": "x = 1"})
        for code in ("raise SystemExit(2)", "raise KeyboardInterrupt"):
            assert env.step({"code": code}).observation["exit_code"] != 0
        assert env.step({"code": "print(x)"}).observation["stdout"] == "1\n"


def test_stock_client_is_told_that_the_server_is_full(server: Any) -> None:
    clients = [_client(server) for _ in range(5)]
    try:
        for client in clients[:4]:
            client.reset()
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
            clients[4].reset()
    finally:
        for client in clients:
            client.close()
