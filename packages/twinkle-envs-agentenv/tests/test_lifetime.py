"""The time a sandbox has."""

import time
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv import _handle

CONNECT = ("POST", "/v2/sandboxes/.*/connect")
SET_TIMEOUT = ("POST", "/sandboxes/.*/timeout")


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let time pass for the client: it then thinks that its sandboxes have been idle for long."""
    passed = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(_handle, "monotonic", lambda: time.monotonic() + passed)
    return pass_time


def asked(server: Any) -> Any:
    return [body["timeout"] for body in server.bodies(*CONNECT)]


def left(server: Any, env: Any) -> Any:
    return server.sandboxes[env.sandbox_id].ends_at - time.monotonic()


def test_a_step_starts_the_idle_time_anew(server: Any, make_env: Any, pass_time: Any) -> None:
    env = make_env(sandbox_timeout=2, command_timeout=1)
    env.reset()
    pass_time(1.0)
    env.step("read_file", {"path": "/missing"})
    assert asked(server) == [2]
    env.step("read_file", {"path": "/missing"})
    assert asked(server) == [2], "hardly any of it had been used"


def test_a_long_lease_is_never_shortened(server: Any, make_env: Any, pass_time: Any) -> None:
    env = make_env(sandbox_timeout=60, command_timeout=1)
    env.reset()
    env.sandbox.set_timeout(5_000)
    pass_time(50)
    env.step("run_command", {"command": "true"})
    assert asked(server) == [61]
    assert left(server, env) > 4_900
    assert server.count(*SET_TIMEOUT) == 1, "only the one made by this test"


def test_the_lease_outlasts_the_command(server: Any, make_env: Any) -> None:
    env = make_env(sandbox_timeout=20, command_timeout=300)
    env.reset()
    env.step("run_command", {"command": "true"})
    assert asked(server) == [360]
    assert left(server, env) > 300
    env.exec("true", timeout_s=1_000)
    assert asked(server) == [360, 1_060]


def test_a_default_step_costs_one_request(server: Any, make_env: Any) -> None:
    env = make_env()
    env.reset()
    before = len(server.requests)
    env.step("run_command", {"command": "true"})
    assert len(server.requests) == before + 1


def test_no_refresh_when_switched_off(server: Any, make_env: Any, pass_time: Any) -> None:
    env = make_env(sandbox_timeout=20, command_timeout=300, refresh_timeout=False)
    env.reset()
    pass_time(19)
    env.step("run_command", {"command": "true"})
    assert asked(server) == []


@pytest.mark.parametrize(
    ("status", "body"), [(500, "broken"), (404, "not found"), (503, "busy"), (401, "")]
)
def test_a_failed_refresh_is_visible(
    server: Any, make_env: Any, pass_time: Any, status: Any, body: Any
) -> None:
    env = make_env(sandbox_timeout=20, command_timeout=1)
    env.reset()
    server.fault(*CONNECT, status=status, body=body, times=99)
    result = env.step("read_file", {"path": "/missing"})
    assert "refresh_error" not in result.info
    pass_time(15)
    result = env.step("write_file", {"path": "/a", "content": "x"})
    assert str(status) in result.info["refresh_error"]
    assert body in result.info["refresh_error"]
    assert (result.error, result.done) == (None, False)


def test_the_refresh_follows_a_failing_step_too(server: Any, make_env: Any, pass_time: Any) -> None:
    env = make_env(sandbox_timeout=20, command_timeout=1)
    env.reset()
    pass_time(10)
    env.step("no_such_tool", {})
    assert asked(server) == [20]
