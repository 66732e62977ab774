"""Sandboxes that go, and servers that answer strangely about them."""

# The fixtures of conftest.py have no type that a test could import.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv._handle import live_handles
from twinkle_agentic.envs.errors import SandboxLostError

START = ("POST", "/process.Process/Start")
FILES = "/files"


@pytest.fixture
def env(make_env: Any) -> Any:
    made = make_env(command_timeout=10)
    made.reset()
    made.step("run_command", {"command": "true"})
    return made


ACTIONS = [
    ("run_command", {"command": "echo hi"}),
    ("read_file", {"path": "/a"}),
    ("write_file", {"path": "/a", "content": "x"}),
]


def assert_lost(env: Any, result: Any) -> None:
    assert result.done
    assert result.info["error_kind"] == "sandbox_lost"
    assert result.info["retryable"] is True
    assert result.error
    assert env.sandbox_id in result.observation
    assert (result.reward, "call reset()" in result.observation) == (0.0, True)


@pytest.mark.parametrize(("tool", "arguments"), ACTIONS)
def test_a_dead_sandbox_ends_the_episode_until_reset(
    server: Any, env: Any, tool: Any, arguments: Any
) -> None:
    server.kill_sandbox(env.sandbox_id)
    assert_lost(env, env.step(tool, arguments))
    asked = len(server.requests)
    assert_lost(env, env.step("run_command", {"command": "true"}))
    assert_lost(env, env.step("no_such_tool", {}))
    assert len(server.requests) == asked
    env.reset()
    assert env.step("run_command", {"command": "echo back"}).observation == "back"


GATEWAY = {"status": 404, "body": "sandbox not found"}  # its text, which is no JSON
ANSWERS: list[dict[str, Any]] = [
    GATEWAY,
    {"status": 502, "body": '{"message":"The sandbox was not found"}'},
    {"status": 502, "body": "auto-resume failed"},
    {"status": 504, "body": "upstream timeout"},
    {"status": 410, "body": "sandbox is not proxyable in its current state"},
    {"status": 500, "body": "???"},
    {"status": 401, "body": ""},
    {"act": "drop"},
]


@pytest.mark.parametrize(("tool", "arguments"), ACTIONS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_whatever_is_raised_the_server_is_asked(
    server: Any, env: Any, tool: Any, arguments: Any, answer: Any
) -> None:
    server.fault("GET", f"/sandboxes/{env.sandbox_id}", **GATEWAY, times=99)
    for method, path in (START, ("GET", FILES), ("POST", FILES), ("GET", "/health")):
        server.fault(method, path, **answer, times=99)
    assert_lost(env, env.step(tool, arguments))


@pytest.mark.parametrize("body", ['{"code":404,"message":"x"}', "", "<html>gone</html>"])
def test_however_the_server_says_so(server: Any, env: Any, body: str) -> None:
    server.fault("GET", f"/sandboxes/{env.sandbox_id}", status=404, body=body, times=99)
    server.fault(*START, **GATEWAY, times=99)
    assert_lost(env, env.step("run_command", {"command": "true"}))


def test_a_sandbox_killed_under_a_running_command(server: Any, make_env: Any) -> None:
    env = make_env(command_timeout=1_000)
    env.reset()
    begun = threading.Event()
    server.on_request = lambda method, path: begun.set() if (method, path) == START else None
    killer = threading.Thread(
        target=lambda: begun.wait(5) and _wait_and_kill(server, env.sandbox_id)
    )
    killer.start()
    result = env.step("run_command", {"command": "sleep 600"})
    killer.join(5)
    assert_lost(env, result)


def _wait_for_a_process(sandbox: Any) -> None:
    deadline = time.monotonic() + 10
    while not any(process.poll() is None for process in sandbox.processes):
        assert time.monotonic() < deadline


def _wait_and_kill(server: Any, sandbox_id: Any) -> None:
    _wait_for_a_process(server.sandboxes[sandbox_id])
    server.kill_sandbox(sandbox_id)


def test_a_server_that_is_down_loses_its_sandboxes(server: Any, env: Any) -> None:
    (handle,) = live_handles()
    server.stop()
    assert_lost(env, env.step("run_command", {"command": "true"}))
    env.close()
    assert handle in live_handles(), "the exit of the interpreter would try again"
    handle.forget()


def test_a_command_that_never_began_is_not_the_model_s_fault(server: Any, make_env: Any) -> None:
    env = make_env(command_timeout=0.5)
    env.reset()
    env.step("run_command", {"command": "true"})
    server.fault(*START, act="hang", times=1)
    result = env.step("run_command", {"command": "true"})
    assert (result.done, result.info["error_kind"], result.info["retryable"]) == (
        False,
        "env",
        True,
    )
    assert "did not begin" in result.observation
    assert "timed_out" not in result.info


def test_the_end_of_an_abandoned_call_does_not_end_the_next_episode(
    server: Any, make_env: Any
) -> None:
    env = make_env()
    env.reset()
    sandbox = server.sandboxes[env.sandbox_id]
    with ThreadPoolExecutor(1) as threads:
        abandoned = threads.submit(env.step, "run_command", {"command": "sleep 60"})
        _wait_for_a_process(sandbox)
        env.reset()
        assert abandoned.result(20).error
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_a_sandbox_that_hangs_is_bounded_and_ends_the_episode(server: Any, make_env: Any) -> None:
    env = make_env(command_timeout=0.5, request_timeout=1)
    env.reset()
    env.step("run_command", {"command": "true"})
    server.fault(*START, act="hang", times=1)
    server.fault(*START, status=502, body="connection refused", times=99)
    server.fault("POST", "/process.Process/.*", act="hang", times=99)
    result = env.step("run_command", {"command": "true"})
    assert (result.done, result.info["error_kind"]) == (True, "timeout")
    assert "does not answer" in result.observation
    assert env.step("run_command", {"command": "true"}).info["error_kind"] == "timeout"


def test_a_sandbox_that_fails_again_and_again_ends_the_episode(server: Any, env: Any) -> None:
    server.fault(*START, status=502, body="connection refused", times=99)
    server.fault("GET", "/health", status=502, body="port is not open", times=99)
    first, second, third = (env.step("run_command", {"command": "true"}) for _ in range(3))
    assert (first.done, second.done) == (False, False)
    assert {first.info["error_kind"], second.info["error_kind"]} == {"env"}
    assert_lost(env, third)
    assert "3 failures in a row" in third.error
    assert_lost(env, env.step("read_file", {"path": "/a"}))


def test_a_success_between_failures_starts_the_count_anew(server: Any, env: Any) -> None:
    for _ in range(4):
        server.fault(*START, status=502, body="connection refused", times=1)
        assert not env.step("run_command", {"command": "true"}).done
        assert env.step("run_command", {"command": "true"}).error is None


def test_a_file_request_that_hangs_ends_the_episode(server: Any, make_env: Any) -> None:
    env = make_env(request_timeout=0.7)
    env.reset()
    server.fault("GET", FILES, act="hang", times=99)
    result = env.step("read_file", {"path": "/a"})
    assert (result.done, result.info["error_kind"]) == (True, "timeout")


def test_a_missing_file_is_not_a_missing_sandbox(server: Any, env: Any) -> None:
    result = env.step("read_file", {"path": "/missing"})
    assert (result.done, result.info["error_kind"]) == (False, "tool")


def test_a_paused_sandbox_that_does_not_resume_by_itself_is_resumed(server: Any, env: Any) -> None:
    server.sandboxes[env.sandbox_id].state = "paused"
    assert env.step("run_command", {"command": "echo awake"}).observation == "awake"
    server.sandboxes[env.sandbox_id].state = "paused"
    assert env.step("write_file", {"path": "/a", "content": "x"}).error is None


def test_a_paused_sandbox_that_cannot_be_resumed_is_lost(server: Any, env: Any) -> None:
    server.sandboxes[env.sandbox_id].state = "paused"
    server.fault("POST", ".*/connect", status=500, body="broken", times=99)
    assert_lost(env, env.step("run_command", {"command": "true"}))


def test_a_connection_that_breaks_keeps_the_output_and_the_episode(server: Any, env: Any) -> None:
    original = server.http.RequestHandlerClass.run

    def breaking(handler: Any, sandbox: Any, body: Any) -> None:
        if "half" in body["process"]["args"][2]:
            handler.send_response(200)
            handler.send_header("content-type", "application/connect+json")
            handler.send_header("transfer-encoding", "chunked")
            handler.end_headers()
            handler.envelope(0, {"event": {"start": {"pid": 1}}})
            handler.envelope(0, {"event": {"data": {"stdout": "aGFsZg=="}}})
            handler.drop()
        else:
            original(handler, sandbox, body)

    server.http.RequestHandlerClass.run = breaking
    result = env.step("run_command", {"command": "echo half; sleep 5"})
    assert (result.done, result.info["error_kind"], result.info["retryable"]) == (
        False,
        "env",
        True,
    )
    assert result.observation.startswith("half\nError: the connection to sandbox")
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_a_stream_without_its_end_is_no_result(server: Any, env: Any) -> None:
    def endless(handler: Any, sandbox: Any, body: Any) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "application/connect+json")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.envelope(0, {"event": {"start": {"pid": 1}}})
        handler.envelope(2, {})
        handler.wfile.write(b"0\r\n\r\n")

    server.http.RequestHandlerClass.run = endless
    result = env.step("run_command", {"command": "true"})
    assert result.error
    assert "exit_code" not in result.info


def test_too_many_requests_are_waited_out(server: Any, env: Any) -> None:
    server.fault(*START, status=429, body="slow down", times=2)
    assert env.step("run_command", {"command": "echo ok"}).observation == "ok"


def test_a_handler_that_uses_the_sdk_on_a_dead_sandbox(server: Any, env: Any) -> None:
    info = {"type": "function", "function": {"name": "t"}}
    env.register_tool(info, lambda e, a: e.sandbox.files.read("/x"))
    result = env.step("t", {})
    assert (result.done, result.info["error_kind"]) == (False, "tool")
    server.kill_sandbox(env.sandbox_id)
    assert_lost(env, env.step("t", {}))


def test_a_handler_that_swallows_the_loss_does_not_hide_it(server: Any, env: Any) -> Any:
    def swallow(env: Any, arguments: Any) -> Any:
        try:
            return env.run_command({"command": "true"})
        except SandboxLostError:
            return "all is well"

    env.register_tool({"type": "function", "function": {"name": "t"}}, swallow)
    assert env.step("t", {}).error is None
    server.kill_sandbox(env.sandbox_id)
    assert_lost(env, env.step("t", {}))


def test_exec_on_a_dead_sandbox_raises_and_is_remembered(server: Any, env: Any) -> None:
    server.kill_sandbox(env.sandbox_id)
    with pytest.raises(SandboxLostError, match="is lost"):
        env.exec("true")
    assert_lost(env, env.step("run_command", {"command": "true"}))
    with pytest.raises(SandboxLostError, match="is lost"):
        env.read_file("/a")
