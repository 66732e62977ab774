# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""`OpenEnvClient` against a server that misbehaves: no wrong answer, no hang, no leak."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvError,
    EnvTimeoutError,
    SessionClosedError,
)
from twinkle_agentic.envs.openenv import ActionRefusedError, OpenEnvClient, ServerError

Url = Callable[[str], str]
Stats = Callable[[], dict[str, Any]]
Eventually = Callable[[Callable[[], bool]], None]


def client(url: str, **settings: Any) -> OpenEnvClient:
    settings.setdefault("tools", [])
    settings.setdefault("message_timeout_s", 10.0)
    return OpenEnvClient("no_such_package", base_url=url, **settings)


def assert_lost(env: OpenEnvClient, result: StepResult, kind: str = "session_lost") -> None:
    """The result says the episode is gone, and so does every later step."""
    assert result.done
    assert result.error
    assert result.info["error_kind"] == kind
    later = env.step("any", {"value": 1})
    assert later.done
    assert later.info["error_kind"] == "session_lost"
    assert later.error is not None and result.error in later.error


def test_reset_and_step_answer(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        assert env.reset().observation == "ready"
        result = env.step("any", {"value": 7})
        assert (result.observation, result.reward, result.done) == ("7", 0.5, False)
        assert result.info == {"metadata": {"answer": 42}, "episode_reward": 0.5}


def test_duplicate_answer_loses_the_session_instead_of_shifting_later_ones(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    with client(rude_url("duplicate")) as env:
        env.reset()
        assert env.step("any", {"value": "mine"}).observation == "mine"
        eventually(lambda: rude_stats()["open"] == 0)  # the client has cut the connection
        assert_lost(env, env.step("any", {"value": "next"}))


def test_frame_nobody_asked_for_loses_the_session(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    with client(rude_url("unsolicited")) as env:
        env.reset()
        eventually(lambda: rude_stats()["open"] == 0)  # the client has cut the connection
        result = env.step("any", {"value": 1})
        assert_lost(env, result)
        assert result.error is not None and "answers no message" in result.error


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("empty", "no JSON"),
        ("junk", "no JSON"),
        ("wrong_type", "expected a frame of type 'observation'"),
        ("no_data", "expected a frame of type 'observation'"),
        ("drop", "without a close frame"),
        ("close", "code 1000"),
    ],
)
def test_answer_that_is_none_loses_the_session(rude_url: Url, behaviour: str, says: str) -> None:
    with client(rude_url(behaviour)) as env:
        env.reset()
        result = env.step("any", {"value": 1})
        assert_lost(env, result)
        assert result.error is not None and says in result.error


@pytest.mark.parametrize("code", [1001, 1008, 1011, 1013, 4000])
def test_close_code_is_named(rude_url: Url, code: int) -> None:
    with client(rude_url("close")) as env:
        env.reset()
        result = env.step("any", {"code": code})
        assert_lost(env, result)
        assert result.error is not None and f"code {code} (bye)" in result.error


@pytest.mark.parametrize(
    "frame", ["null", "[]", "1", '{"type":"observation"}', "{" * 100_000, '{"type": "error"}']
)
def test_malformed_frame_is_a_failed_step(rude_url: Url, frame: str) -> None:
    with client(rude_url("raw")) as env:
        env.reset()
        result = env.step("any", {"frame": frame})
        assert_lost(env, result)


def test_observation_of_another_type_is_still_text(rude_url: Url) -> None:
    with client(rude_url("raw")) as env:
        env.reset()
        frame = '{"type":"observation","data":{"observation":["a","b"],"reward":true,"done":0}}'
        result = env.step("any", {"frame": frame})
        assert result.observation == '["a", "b"]'
        assert (result.reward, result.done) == (1.0, False)


def test_timeout_has_text_and_loses_the_session(rude_url: Url) -> None:
    with client(rude_url("echo"), message_timeout_s=0.3) as env:
        env.reset()
        result = env.step("any", {"value": 1, "delay": 5})
        assert_lost(env, result, kind="timeout")
        assert result.error is not None
        assert "no answer to step within 0.3 s" in result.error
        assert "message_timeout_s" in result.error
        assert result.info["retryable"] is True


def test_late_answer_never_reaches_the_next_episode(rude_url: Url) -> None:
    with client(rude_url("echo"), message_timeout_s=0.5) as env:
        env.reset()
        assert env.step("any", {"value": "late", "delay": 0.8}).done
        env.reset()
        for value in range(20):
            assert env.step("any", {"value": value}).observation == str(value)


def test_reset_that_is_never_answered_raises_within_its_limit(rude_url: Url) -> None:
    with (
        client(rude_url("reset_hangs"), message_timeout_s=0.3) as env,
        pytest.raises(EnvTimeoutError, match=r"no answer to reset within 0\.3 s"),
    ):
        env.reset()


def test_steps_after_a_failed_reset_say_so(rude_url: Url) -> None:
    with client(rude_url("reset_hangs"), message_timeout_s=0.3) as env:
        with pytest.raises(EnvTimeoutError):
            env.reset()
        result = env.step("any", {})
        assert result.done
        assert result.info["error_kind"] == "session_lost"


def test_step_before_reset_opens_no_session(rude_url: Url, rude_stats: Stats) -> None:
    with client(rude_url("echo")) as env:
        result = env.step("any", {"value": 1})
        assert result.done
        assert result.error is not None and "call reset" in result.error
        with pytest.raises(SessionClosedError, match="call reset"):
            env.execute({"value": 1})
    assert rude_stats()["all"] == 0


def test_full_server_is_refused_at_once_with_zero_timeout(rude_url: Url, rude_stats: Stats) -> None:
    env = client(rude_url("full"), capacity_timeout_s=0)
    with pytest.raises(CapacityError) as caught:
        env.reset()
    for knob in ("capacity_timeout_s=0", "max_concurrent_envs", "1 of 1 sessions"):
        assert knob in str(caught.value)
    assert rude_stats()["all"] == 1


def test_full_server_is_given_up_after_the_time_allowed(rude_url: Url, rude_stats: Stats) -> None:
    env = client(rude_url("full"), capacity_timeout_s=0.5)
    with pytest.raises(CapacityError, match=r"within capacity_timeout_s=0\.5"):
        env.reset()
    assert 2 <= rude_stats()["all"] <= 20


def test_full_server_is_waited_out(rude_url: Url, rude_stats: Stats) -> None:
    with client(rude_url("full_twice")) as env:
        assert env.reset().observation == "ready"
        assert rude_stats()["all"] == 3


def test_load_balancer_without_room_counts_as_full(rude_url: Url) -> None:
    env = client(rude_url("busy"), capacity_timeout_s=0)
    with pytest.raises(CapacityError, match="HTTP 503"):
        env.reset()


def test_environment_that_cannot_be_built_is_named(rude_url: Url) -> None:
    env = client(rude_url("factory"))
    with pytest.raises(ServerError, match="could not build BadEnv") as caught:
        env.reset()
    assert caught.value.code == "FACTORY_ERROR"


@pytest.mark.parametrize(
    ("code", "kind", "done"),
    [
        ("VALIDATION_ERROR", "tool", False),
        ("EXECUTION_ERROR", "tool", False),
        ("UNKNOWN_TYPE", "env", False),
        ("SESSION_ERROR", "session_lost", True),
        ("SOMETHING_NEW", "session_lost", True),
    ],
)
def test_error_codes_are_told_apart(rude_url: Url, code: str, kind: str, done: bool) -> None:
    with client(rude_url("error")) as env:
        env.reset()
        result = env.step("any", {"code": code, "message": "what happened"})
        assert (result.done, result.info["error_kind"]) == (done, kind)
        assert "what happened" in result.observation
        assert result.observation.startswith("Error: ")


def test_execution_error_without_text_gets_one(rude_url: Url) -> None:
    with client(rude_url("error")) as env:
        env.reset()
        result = env.step("any", {"code": "EXECUTION_ERROR", "message": ""})
        assert result.error == "the environment raised an exception without a message"


def test_field_errors_reach_the_model(rude_url: Url) -> None:
    errors = [{"loc": ["column"], "msg": "Input should be less than 7", "type": "less_than"}]
    with client(rude_url("error")) as env:
        env.reset()
        result = env.step("any", {"code": "VALIDATION_ERROR", "extra": {"errors": errors}})
        assert "column: Input should be less than 7" in result.observation
        with pytest.raises(ActionRefusedError) as caught:
            env.execute({"code": "VALIDATION_ERROR", "extra": {"errors": errors}})
        assert caught.value.errors == errors


def test_answer_above_the_limit_loses_the_session_and_names_the_limit(rude_url: Url) -> None:
    with client(rude_url("big"), max_message_bytes=100_000) as env:
        env.reset()
        assert len(env.step("any", {"size": 90_000}).observation) > 32_768
        result = env.step("any", {"size": 200_000})
        assert_lost(env, result)
        assert result.error is not None and "max_message_bytes=100000" in result.error


def test_schema_above_the_limit_fails_the_reset_and_names_the_limit(rude_url: Url) -> None:
    with (
        client(rude_url("long_schema"), max_message_bytes=10_000) as env,
        pytest.raises(SessionClosedError, match="/schema is larger than max_message_bytes=10000"),
    ):
        env.reset()


def test_schema_that_no_parser_takes_is_none(rude_url: Url) -> None:
    with client(rude_url("deep_schema")) as env:
        assert env.reset().observation == "ready"


@pytest.mark.parametrize(
    ("behaviour", "tool", "says"),
    [
        ("schema_404", "run_python", None),
        ("schema_403", "env_action", "HTTP 403"),
        ("schema_500", "env_action", "HTTP 500"),
        ("schema_503", "env_action", "HTTP 503"),
        ("deep_schema", "env_action", "HTTP 200 without a JSON object"),
    ],
)
def test_only_a_server_without_a_schema_endpoint_is_taken_to_run_python(
    rude_url: Url, behaviour: str, tool: str, says: str | None
) -> None:
    url = rude_url(behaviour)
    with client(url, tools=None) as env:
        info = env.reset().info
        assert [each["function"]["name"] for each in env.tools()] == [tool]
        assert info.get("schema_error") == (says and f"GET {url}/schema answered {says}")


def test_schema_comes_from_another_server_where_one_fails(rude_url: Url) -> None:
    urls = [rude_url("schema_500"), rude_url("any_schema")]
    for _ in range(10):  # chance says which is asked first
        with OpenEnvClient("no_such_package", base_url=urls) as env:
            assert "value" in env.tools()[0]["function"]["parameters"]["properties"]
            assert "schema_error" not in env.reset().info


def test_action_above_the_limit_is_refused_and_the_session_lives(rude_url: Url) -> None:
    with client(rude_url("echo"), max_action_bytes=1000) as env:
        env.reset()
        result = env.step("any", {"value": "x" * 2000})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert result.error is not None and "max_action_bytes" in result.error
        assert env.step("any", {"value": "still here"}).observation == "still here"


def test_message_above_the_servers_limit_names_it(rude_url: Url) -> None:
    with client(rude_url("echo"), max_action_bytes=64 * 2**20) as env:
        env.reset()
        result = env.step("any", {"value": "x" * (17 * 2**20)})
        assert_lost(env, result)
        assert result.error is not None and "ws_max_size" in result.error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object()])
def test_arguments_that_are_no_json_are_refused(rude_url: Url, value: Any) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        result = env.step("any", {"value": value})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert env.step("any", {"value": 1}).observation == "1"


def test_lone_surrogates_and_other_scripts_arrive(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        assert env.step("any", {"value": "中文 \ud800 🙂"}).observation == "中文 � 🙂"


def test_reward_that_is_no_number_is_flagged_and_not_summed(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        env.step("any", {"value": 1, "reward": 1.5})
        result = env.step("any", {"value": 2, "reward": "not a number"})
        assert result.error is not None and "not a finite number" in result.error
        assert env.episode_reward == 1.5


def test_missing_reward_is_flagged(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        result = env.step("any", {"value": 1, "reward": None})
        assert (result.reward, result.info["reward_missing"]) == (0.0, True)


def test_nan_reward_on_the_wire_is_flagged(rude_url: Url) -> None:
    with client(rude_url("raw")) as env:
        env.reset()
        frame = '{"type":"observation","data":{"observation":{},"reward":NaN,"done":false}}'
        result = env.step("any", {"frame": frame})
        assert result.error is not None and "nan" in result.error
        assert env.episode_reward == 0.0


def test_step_after_done_is_not_sent(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        assert env.step("any", {"value": 1, "end": True}).done
        result = env.step("any", {"value": 2})
        assert result.done
        assert result.error is not None and "over" in result.error
        assert result.info["episode_reward"] == 0.5
        assert env.execute({"value": "scored"}).observation.text == "scored"
        assert env.episode_reward == 0.5


def test_handshake_that_hangs_is_bounded_and_leaves_nothing(
    rude_ports: dict[str, int], rude_stats: Stats, eventually: Eventually
) -> None:
    env = client(f"ws://127.0.0.1:{rude_ports['hang']}", connect_timeout_s=0.3)
    with pytest.raises(EnvTimeoutError, match=r"within connect_timeout_s=0\.3"):
        env.reset()
    eventually(lambda: rude_stats()["hanging"] == 0)


def test_server_that_answers_no_ping_is_noticed(rude_ports: dict[str, int]) -> None:
    url = f"http://127.0.0.1:{rude_ports['deaf']}"
    with client(url, ping_interval_s=0.1, ping_timeout_s=0.2, close_timeout_s=0.2) as env:
        env.reset()
        result = env.step("any", {"value": 1})
        assert_lost(env, result)
        assert result.error is not None and "ping_timeout_s=0.2" in result.error


def test_pings_can_be_turned_off(rude_ports: dict[str, int]) -> None:
    url = f"http://127.0.0.1:{rude_ports['deaf']}"
    settings = {"ping_interval_s": None, "message_timeout_s": 1.0, "close_timeout_s": 0.2}
    with client(url, **settings) as env:
        env.reset()
        assert env.step("any", {"value": 1}).info["error_kind"] == "timeout"


def test_unreachable_server_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    env = client(f"http://127.0.0.1:{port}")
    with pytest.raises(SessionClosedError, match=rf"127\.0\.0\.1:{port}.*is the server running"):
        env.reset()


def test_server_of_another_kind_is_named(rude_ports: dict[str, int]) -> None:
    env = client(f"http://127.0.0.1:{rude_ports['rude']}/stats/of")
    with pytest.raises(SessionClosedError, match="HTTP 200"):
        env.reset()


def test_loopback_ignores_the_proxy_of_the_environment(
    rude_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "WS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with client(rude_url("echo")) as env:
        assert env.reset().observation == "ready"


def test_explicit_proxy_is_used_even_for_loopback(rude_url: Url) -> None:
    env = client(rude_url("echo"), proxy="http://127.0.0.1:9")
    with pytest.raises(SessionClosedError, match=r"cannot (connect|reach)"):
        env.reset()


def test_explicit_proxy_carries_the_session(
    rude_url: Url, rude_ports: dict[str, int], rude_stats: Stats
) -> None:
    before = rude_stats()["proxied"]
    with client(rude_url("echo"), proxy=f"http://127.0.0.1:{rude_ports['proxy']}") as env:
        env.reset()
        assert env.step("any", {"value": 1}).observation == "1"
    assert rude_stats()["proxied"] == before + 1


def test_headers_are_sent(rude_url: Url, rude_stats: Stats) -> None:
    with client(rude_url("echo"), headers={"Authorization": "Bearer token"}) as env:
        env.reset()
        assert rude_stats()["headers"]["Authorization"] == "Bearer token"


def test_no_compression_is_offered(rude_url: Url, rude_stats: Stats) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        assert "Sec-WebSocket-Extensions" not in rude_stats()["headers"]


def test_two_threads_on_one_client_each_get_their_own_answer(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        env.reset()
        wrong: list[tuple[str, str]] = []

        def work(name: int) -> None:
            for i in range(50):
                value = f"{name}-{i}"
                found = env.step("any", {"value": value}).observation
                if found != value:
                    wrong.append((value, found))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert env.episode_reward == pytest.approx(0.5 * 200)


def test_made_in_one_loop_stepped_in_a_thread_closed_in_another_loop(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    async def make() -> OpenEnvClient:
        env = client(rude_url("echo"))
        await env.areset()
        return env

    async def finish(env: OpenEnvClient) -> str:
        text = (await env.astep("any", {"value": "second loop"})).observation
        await env.aclose()
        return text

    env = asyncio.run(make())
    seen: list[str] = []
    thread = threading.Thread(
        target=lambda: seen.append(env.step("any", {"value": "thread"}).observation)
    )
    thread.start()
    thread.join()
    assert seen == ["thread"]
    assert asyncio.run(finish(env)) == "second loop"
    eventually(lambda: rude_stats()["open"] == 0)


async def test_sync_methods_work_while_the_caller_runs_a_loop(rude_url: Url) -> None:
    with client(rude_url("echo")) as env:
        assert env.reset().observation == "ready"
        assert env.step("any", {"value": 1}).observation == "1"


async def test_a_slow_step_leaves_other_sessions_alone(rude_url: Url) -> None:
    slow, fast = client(rude_url("echo")), client(rude_url("echo"))
    async with slow, fast:
        await slow.areset()
        await fast.areset()
        waiting = asyncio.ensure_future(slow.astep("any", {"value": "slow", "delay": 1}))
        answers = [(await fast.astep("any", {"value": i})).observation for i in range(20)]
        assert answers == [str(i) for i in range(20)]
        assert not waiting.done()
        assert (await waiting).observation == "slow"


async def test_cancelled_step_loses_the_session_and_leaves_nothing(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    env = client(rude_url("echo"))
    await env.areset()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await env.astep("any", {"value": "late", "delay": 2})
    result = await env.astep("any", {"value": "next"})
    assert result.done
    assert result.error is not None and "cancelled" in result.error
    await asyncio.to_thread(eventually, lambda: rude_stats()["open"] == 0)
    await env.aclose()


async def test_cancelled_reset_leaves_nothing(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    env = client(rude_url("reset_hangs"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await env.areset()
    await asyncio.to_thread(eventually, lambda: rude_stats()["open"] == 0)


async def test_cancelled_wait_for_room_ends_at_once(rude_url: Url, rude_stats: Stats) -> None:
    env = client(rude_url("full"), capacity_timeout_s=60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await env.areset()
    tried = rude_stats()["all"]
    await asyncio.sleep(1)  # long enough for another attempt, if there were one
    assert rude_stats()["all"] == tried


def test_close_while_a_step_runs_ends_the_step(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    env = client(rude_url("echo"))
    env.reset()
    results: list[StepResult] = []
    thread = threading.Thread(target=lambda: results.append(env.step("any", {"delay": 30})))
    thread.start()
    time.sleep(0.1)  # the step must be on its way; if it is not, it is refused, which is fine too
    env.close()
    thread.join(10)
    assert not thread.is_alive()
    assert results[0].done
    assert results[0].error


def test_close_is_bounded_when_the_server_does_not_let_go(rude_url: Url) -> None:
    env = client(rude_url("slow_close"), close_timeout_s=0.3)
    env.reset()
    start = time.monotonic()
    env.close()
    assert time.monotonic() - start < 5


def test_close_twice_and_reset_after_close(rude_url: Url, rude_stats: Stats) -> None:
    env = client(rude_url("echo"))
    env.close()
    env.reset()
    env.close()
    env.close()
    assert env.step("any", {}).done
    assert env.reset().observation == "ready"
    assert rude_stats()["all"] == 2
    env.close()


def test_reset_keeps_the_session(rude_url: Url, rude_stats: Stats) -> None:
    with client(rude_url("echo")) as env:
        for _ in range(3):
            env.reset()
            env.step("any", {"value": 1})
            assert env.episode_reward == 0.5
        assert rude_stats()["all"] == 1


def test_reset_reconnects_when_the_idle_connection_died(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    with client(rude_url("close")) as env:
        env.reset()
        env.step("any", {})
        assert env.reset().observation == "ready"
        assert rude_stats()["all"] == 2


def test_close_frees_the_slot_before_it_returns(rude_url: Url, rude_stats: Stats) -> None:
    env = client(rude_url("echo"))
    env.reset()
    assert rude_stats()["open"] == 1
    env.close()
    assert rude_stats()["open"] == 0


def test_forgotten_client_is_closed(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    env = client(rude_url("echo"))
    env.reset()
    assert rude_stats()["open"] == 1
    del env
    gc.collect()
    eventually(lambda: rude_stats()["open"] == 0)


def test_hundred_rounds_leave_descriptors_flat(rude_url: Url) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def one_round() -> None:
        with client(rude_url("echo")) as env:
            env.reset()
            env.step("any", {"value": 1})

    for _ in range(5):
        one_round()
    before = descriptors()
    for _ in range(100):
        one_round()
    assert descriptors() <= before + 2


def test_a_hundred_sessions_share_one_thread(rude_url: Url) -> None:
    with client(rude_url("echo")) as first:
        first.reset()
        before = threading.active_count()
        envs = [client(rude_url("echo")) for _ in range(100)]
        for env in envs:
            env.reset()
        assert threading.active_count() == before
        for env in envs:
            env.close()


_SCRIPT = """
import os, signal, sys, threading
from twinkle_agentic.envs.openenv import OpenEnvClient

env = OpenEnvClient("no_such_package", base_url=sys.argv[1], tools=[], message_timeout_s=30)
env.reset()
"""


def run_script(body: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", _SCRIPT + textwrap.dedent(body), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_interpreter_exit_closes_the_session(rude_url: Url, rude_stats: Stats) -> None:
    done = run_script("print('exiting')", rude_url("echo"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "exiting\n", "")
    assert rude_stats() == {**rude_stats(), "open": 0, "all": 1}


def test_keyboard_interrupt_in_a_step_leaves_nothing(
    rude_url: Url, rude_stats: Stats, eventually: Eventually
) -> None:
    done = run_script(
        """
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            env.step("any", {"value": 1, "delay": 3})
        except KeyboardInterrupt:
            print(env.step("any", {"value": 2}).info["error_kind"])
        """,
        rude_url("echo"),
    )
    assert done.stdout == "session_lost\n", done.stderr
    eventually(lambda: rude_stats()["open"] == 0)


def test_forked_child_is_told_to_use_spawn_and_leaves_the_parent_alone(
    rude_url: Url, rude_stats: Stats
) -> None:
    done = run_script(
        """
        import gc
        child = os.fork()
        if child == 0:
            try:
                assert env.step("any", {"value": 1}).info["error_kind"] == "session_lost"
                env.close()
                try:
                    env.reset()
                except ConnectionError as error:
                    print(error, flush=True)
                del env
                gc.collect()
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(env.step("any", {"value": "parent"}).observation)
        """,
        rude_url("echo"),
    )
    assert done.stdout.endswith('method "spawn"\nparent\n'), done
    assert rude_stats() == {**rude_stats(), "open": 0, "all": 1}


def test_server_killed_in_a_step_is_told_at_once(start_rude_server: Any) -> None:
    with start_rude_server("rude_server.py") as (ports, process):
        env = client(f"http://127.0.0.1:{ports['rude']}/echo/killed")
        env.reset()
        results: list[StepResult] = []
        thread = threading.Thread(target=lambda: results.append(env.step("any", {"delay": 30})))
        thread.start()
        os.kill(process.pid, signal.SIGKILL)
        thread.join(10)
        assert not thread.is_alive()
        assert_lost(env, results[0])
        with pytest.raises(SessionClosedError, match="cannot connect"):
            env.reset()
        env.close()


def test_errors_are_of_the_standard_library_too(rude_url: Url) -> None:
    assert issubclass(EnvTimeoutError, TimeoutError)
    assert issubclass(ActionRefusedError, ValueError)
    assert issubclass(ServerError, EnvError)


def test_calls_of_many_tasks_and_threads_on_one_client_all_get_their_own_answer(
    rude_url: Url,
) -> None:
    env = client(rude_url("echo"))
    env.reset()
    wrong: list[tuple[str, str]] = []

    async def tasks(name: str) -> None:
        async def one(i: int) -> None:
            value = f"{name}-{i}"
            found = (await env.astep("any", {"value": value})).observation
            if found != value:
                wrong.append((value, found))

        for round_ in range(20):
            await asyncio.gather(*(one(round_ * 10 + i) for i in range(10)))

    def steps(name: str) -> None:
        for i in range(200):
            # Long ones take another way than short ones.
            value = f"{name}-{i}-" + "x" * (10_000 if i % 3 == 0 else 10)
            found = env.step("any", {"value": value}).observation
            if found != value:
                wrong.append((value[:20], found[:20]))

    threads = [
        *(threading.Thread(target=lambda n=n: asyncio.run(tasks(f"loop{n}"))) for n in range(2)),
        *(threading.Thread(target=steps, args=(f"thread{n}",)) for n in range(2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert env.episode_reward == pytest.approx(0.5 * 800)
    env.close()
