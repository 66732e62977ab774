"""Creation: what a server may answer, and that nothing is left behind."""

# The fixtures of conftest.py have no type that a test could import.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv import SandboxRefusedError, SandboxSetupError
from twinkle_agentic.envs.agentenv._limits import limiter_of
from twinkle_agentic.envs.errors import ErrorKind, SandboxError, SandboxUnavailableError

CREATE = ("POST", "/v2/sandboxes")
JSON = {"content-type": "application/json"}


def test_reset_asks_for_what_the_document_promises(server: Any, make_env: Any) -> None:
    env = make_env(
        sandbox_timeout=77, sandbox_envs={"A": "1"}, metadata={"team": "x"}, api_key="k", run="r1"
    )
    env.reset({"user_data": {"episode_id": "e-7"}})
    (body,) = server.bodies(*CREATE)
    assert body["templateID"] == "base"
    assert body["timeout"] == 77
    assert body["envVars"] == {"A": "1"}
    assert body["autoPause"] is True
    assert body["autoResume"] == {"enabled": True}
    labels = body["metadata"]
    assert labels["team"] == "x"
    assert labels["twinkle-run"] == "r1"
    assert labels["twinkle-created-by"] == "twinkle-envs-agentenv"
    assert labels["twinkle-pid"] == str(os.getpid())
    assert labels["twinkle-host"]
    assert labels["twinkle-episode"] == "e-7"
    headers = server.requests[0][2]
    assert headers["x-api-key"] == "k"
    assert headers["idempotency-key"] == labels["twinkle-create"]


def test_kill_on_timeout_leaves_nothing_to_resume(server: Any, make_env: Any) -> None:
    make_env(on_timeout="kill").reset()
    (body,) = server.bodies(*CREATE)
    assert body["autoPause"] is False
    assert "autoResume" not in body


def test_environ_is_never_written(server: Any, make_env: Any) -> None:
    before = dict(os.environ)
    env = make_env(api_key="k")
    env.reset()
    env.step("run_command", {"command": "true"})
    env.close()
    assert dict(os.environ) == before


def test_two_servers_and_two_keys_in_one_process(new_server: Any, make_env: Any) -> None:
    one, two = new_server(), new_server()
    first = make_env(api_url=one.url, api_key="key-1")
    second = make_env(api_url=two.url, api_key="key-2")
    for env in (first, second, first):
        env.reset()
    for env, server, key in ((first, one, "key-1"), (second, two, "key-2")):
        assert env.sandbox_id in server.sandboxes
        assert env.step("run_command", {"command": "echo here"}).observation == "here"
        assert {r[2]["x-api-key"] for r in server.requests if "x-api-key" in r[2]} == {key}


@pytest.mark.parametrize(
    ("status", "body", "headers", "words", "retryable"),
    [
        (401, "", {}, "refuses the API key.*E2B_API_KEY", False),
        (401, '{"code":401,"message":"bad key"}', JSON, "bad key.*E2B_API_KEY", False),
        (403, "", {}, "refuses the API key", False),
        (400, '{"code":400,"message":"template base not found"}', JSON, "template base not", False),
        (404, "no such route", {}, "refuses a sandbox of template 'base' .*no such route", False),
        (405, "", {}, "pull request 306.*e2b<=2.50.0.*e2b 2", False),
        (422, "{}", JSON, "422", False),
    ],
)
def test_a_refusal_is_not_retried_and_says_why(
    server: Any, make_env: Any, status: Any, body: Any, headers: Any, words: Any, retryable: Any
) -> None:
    server.fault(*CREATE, status=status, body=body, headers=headers, times=9)
    with pytest.raises(SandboxRefusedError, match=words) as caught:
        make_env().reset()
    assert caught.value.retryable is retryable
    assert caught.value.kind is ErrorKind.ENV
    assert server.url in str(caught.value)
    assert server.count(*CREATE) == 1


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (503, "no nodes available", {}),
        (503, '{"code":503,"message":"busy"}', JSON),
        (429, '{"code":429,"message":"too many"}', JSON | {"retry-after": "0"}),
        (429, "", {}),
        (504, "upstream timeout", {}),
        (502, "bad gateway", {}),
        (500, '{"code":500,"message":"out of memory"}', JSON),
    ],
)
def test_what_may_pass_is_tried_again_with_the_same_key(
    server: Any, make_env: Any, status: Any, body: Any, headers: Any
) -> None:
    server.fault(*CREATE, status=status, body=body, headers=headers, times=2)
    env = make_env()
    env.reset()
    assert server.count(*CREATE) == 3
    keys = {r[2]["idempotency-key"] for r in server.requests if r[:2] == CREATE}
    assert len(keys) == 1
    assert list(server.sandboxes) == [env.sandbox_id]


@pytest.mark.parametrize(
    ("body", "words"), [("no nodes available", "no nodes available"), ("", "")]
)
def test_a_full_server_is_waited_for_within_the_limit(
    server: Any, make_env: Any, body: Any, words: Any
) -> None:
    server.fault(*CREATE, status=503, body=body, times=99)
    with pytest.raises(SandboxUnavailableError, match=f"capacity_timeout_s=0.6.*{words}") as caught:
        make_env(capacity_timeout_s=0.6).reset()
    assert caught.value.retryable
    assert caught.value.kind is ErrorKind.CAPACITY
    assert 1 < server.count(*CREATE) < 9


def test_zero_capacity_timeout_refuses_at_once(server: Any, make_env: Any) -> None:
    server.fault(*CREATE, status=429, body="", times=99)
    with pytest.raises(SandboxUnavailableError, match="raise capacity_timeout_s"):
        make_env(capacity_timeout_s=0).reset()
    assert server.count(*CREATE) == 1


def test_a_long_retry_after_is_believed(server: Any, make_env: Any) -> None:
    server.fault(*CREATE, status=429, headers={"retry-after": "3600"}, times=99)
    with pytest.raises(SandboxUnavailableError, match="no room"):
        make_env(capacity_timeout_s=5).reset()
    assert server.count(*CREATE) == 1


def test_a_failing_server_is_not_tried_for_ever(server: Any, make_env: Any) -> None:
    server.fault(*CREATE, status=500, body="{}", headers=JSON, times=99)
    with pytest.raises(SandboxUnavailableError, match="in 4 tries"):
        make_env().reset()
    assert server.count(*CREATE) == 4


def test_a_create_that_hangs_is_bounded(server: Any, make_env: Any) -> None:
    server.fault(*CREATE, act="hang", times=9)
    with pytest.raises(SandboxUnavailableError, match="gave no sandbox"):
        make_env(request_timeout=0.5, capacity_timeout_s=0).reset()


def test_no_server_there(make_env: Any) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"127\.0\.0\.1:1 gave no sandbox") as caught:
        make_env(api_url="http://127.0.0.1:1", capacity_timeout_s=0).reset()
    assert caught.value.retryable


@pytest.mark.parametrize("status", [502, 504])
def test_a_sandbox_whose_answer_was_lost_is_killed(server: Any, make_env: Any, status: Any) -> None:
    server.fault(*CREATE, act="late", status=status, body="upstream timeout")
    env = make_env()
    env.reset()
    assert list(server.sandboxes) == [env.sandbox_id]
    assert len(server.killed) == 1


def test_strays_are_told_by_their_label_where_the_server_does_not_filter(
    server: Any, make_env: Any
) -> None:
    other = make_env()
    other.reset()
    server.filters_lists = False
    server.fault(*CREATE, act="late", status=504)
    env = make_env()
    env.reset()
    assert set(server.sandboxes) == {other.sandbox_id, env.sandbox_id}


def test_a_connection_dropped_during_create_leaves_one_sandbox(server: Any, make_env: Any) -> None:
    server.fault(*CREATE, act="drop")
    env = make_env()
    env.reset()
    assert list(server.sandboxes) == [env.sandbox_id]


def test_creations_are_limited_over_all_envs(server: Any, make_env: Any) -> None:
    server.create_delay_s = 0.02
    envs = [make_env(max_concurrent_creates=3) for _ in range(24)]
    with ThreadPoolExecutor(24) as threads:
        list(threads.map(lambda env: env.reset(), envs))
    assert server.most_creating == 3
    assert len(server.sandboxes) == 24
    assert limiter_of(server.url, "creations").running == 0


def test_setup_output_is_the_first_observation(make_env: Any) -> None:
    env = make_env(setup_commands=["echo one", "true", "echo two >&2"])
    assert env.reset().observation == "one\n[stderr]\ntwo"
    assert env.reset().observation == "one\n[stderr]\ntwo"


def test_setup_output_is_truncated_as_a_whole(make_env: Any) -> None:
    env = make_env(setup_commands=["head -c 30000 /dev/zero | tr '\\0' a"] * 2)
    text = env.reset().observation
    assert "of 60001 characters cut" in text
    assert text.startswith("a" * 16_384)
    assert text.endswith("a" * 16_384)


def test_a_failing_setup_command_kills_the_sandbox(server: Any, make_env: Any) -> None:
    env = make_env(setup_commands=["true", "echo half; exit 7", "echo never"])
    with pytest.raises(SandboxSetupError, match="setup command 2 of 3 ended with exit code 7") as e:
        env.reset()
    assert (e.value.exit_code, e.value.command) == (7, "echo half; exit 7")
    assert e.value.output == "half\n[exit code 7]"
    assert not e.value.retryable
    assert server.sandboxes == {}
    assert env.sandbox_id is None
    assert env.step("run_command", {"command": "true"}).done


def test_a_failing_setup_command_may_be_observed(make_env: Any) -> None:
    env = make_env(setup_commands=["exit 7", "echo on"], setup_errors="observe")
    assert env.reset().observation == "[exit code 7]\non"


def test_command_timeout_holds_for_setup(server: Any, make_env: Any) -> None:
    env = make_env(setup_commands=["echo begun; sleep 60"], command_timeout=0.7)
    with pytest.raises(SandboxSetupError, match="command_timeout") as caught:
        env.reset()
    assert caught.value.retryable
    assert "begun" in caught.value.output
    assert server.sandboxes == {}


def test_the_first_command_waits_for_the_agent(server: Any, make_env: Any) -> None:
    server.fault("POST", "/process.Process/Start", status=502, body="connection refused", times=4)
    env = make_env()
    env.reset()
    assert env.step("run_command", {"command": "echo up"}).observation == "up"
    # Later ones do not: they may have begun.
    server.fault("POST", "/process.Process/Start", status=502, body="connection refused", times=1)
    result = env.step("run_command", {"command": "echo up"})
    assert (result.done, result.info["error_kind"]) == (False, "env")
    assert env.step("run_command", {"command": "echo up"}).observation == "up"


def test_waiting_for_the_agent_is_bounded(server: Any, make_env: Any) -> None:
    server.fault("POST", "/process.Process/Start", status=502, body="connection refused", times=99)
    env = make_env(setup_commands=["true"], ready_timeout_s=0.5)
    with pytest.raises(SandboxError, match="failed after"):
        env.reset()
    assert server.sandboxes == {}


def test_close_while_a_sandbox_starts_kills_it(server: Any, make_env: Any) -> None:
    server.create_delay_s = 0.3
    begun = threading.Event()
    server.on_request = lambda method, path: begun.set() if (method, path) == CREATE else None
    env = make_env()
    with ThreadPoolExecutor(1) as threads:
        reset = threads.submit(env.reset)
        assert begun.wait(5)
        env.close()
        with pytest.raises(SandboxError, match="closed while"):
            reset.result(10)
    assert server.sandboxes == {}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"template": ""}, ValueError, "aenv pull"),
        ({"template": None}, ValueError, "template must name"),
        ({"sandbox_timeout": 0}, ValueError, "sandbox_timeout must be above 0"),
        ({"command_timeout": -1}, ValueError, "command_timeout must be above 0"),
        ({"command_timeout": True}, ValueError, "command_timeout"),
        ({"setup_commands": "ls"}, TypeError, "list of commands"),
        ({"setup_commands": [""]}, TypeError, "non-empty"),
        ({"sandbox_envs": {"A": 1}}, TypeError, "sandbox_envs must map text to text"),
        ({"metadata": {"twinkle-run": "x"}}, ValueError, "are taken"),
        ({"on_timeout": "stop"}, ValueError, "'pause' or 'kill'"),
        ({"setup_errors": "no"}, ValueError, "'raise' or 'observe'"),
        ({"max_concurrent_creates": 0}, ValueError, "at least 1"),
        ({"request_timeout": 0}, ValueError, "request_timeout"),
        ({"sandbox_timout": 3}, TypeError, "sandbox_timout"),
    ],
)
def test_impossible_arguments_are_refused_by_name(
    make_env: Any, arguments: Any, error: Any, words: Any
) -> None:
    with pytest.raises(error, match=words):
        make_env(**arguments)
