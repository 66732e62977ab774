# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""`OpenEnvClient` against OpenEnv's own server, in its own process: every trap there is."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvError,
    EnvTimeoutError,
    SessionClosedError,
)
from twinkle_agentic.envs.openenv import ActionRefusedError, OpenEnvClient, ServerError
from twinkle_agentic.tools.tool_manager import ToolManager

pytestmark = pytest.mark.timeout(180)  # the first test waits for the servers to import openenv

Client = Callable[..., OpenEnvClient]


@pytest.fixture
def client(openenv_ports: dict[str, int]) -> Client:
    def make(server: str = "lab", **settings: Any) -> OpenEnvClient:
        settings.setdefault("message_timeout_s", 20.0)
        url = f"http://127.0.0.1:{openenv_ports[server]}"
        return OpenEnvClient("no_such_package", base_url=url, **settings)

    return make


def say(value: str, number: float = 0.0) -> dict[str, Any]:
    return {"command": "say", "value": value, "number": number}


def test_the_documents_example(client: Client) -> None:
    env = client("code")
    env.reset()
    result = env.step("run_python", {"code": "print(1 + 1)"})
    assert result.observation == "2"
    assert env.last_result.observation.exit_code == 0
    assert env.episode_reward == 0.1
    env.close()


def test_default_tool_is_run_python_where_the_action_takes_code(client: Client) -> None:
    with client("code") as env:
        (tool,) = env.tools()
        assert tool["function"]["name"] == "run_python"
        assert tool["function"]["parameters"]["required"] == ["code"]
        env.reset()
        result = env.step("run_python", {"code": "1/0"})
        assert result.observation == (
            "[stderr]\nZeroDivisionError: division by zero\n[exit code 1]"
        )
        assert (result.reward, result.error) == (-1.0, None)


def test_action_that_the_server_fails_to_describe_is_not_offered_as_python(client: Client) -> None:
    with client("undescribed") as env:
        (tool,) = env.tools()
        assert tool["function"]["name"] == "env_action"
        assert tool["function"]["parameters"]["properties"] == {}
        assert env.reset().info["schema_error"] == f"GET {env.url}/schema answered HTTP 500"
        assert env.step("env_action", say("hello")).observation == "hello"
        refused = env.step("env_action", {"code": "print(1)"})
        assert refused.error is not None and "command: Field required" in refused.error
        assert not refused.done


def test_default_tool_of_another_action_has_its_fields(client: Client) -> None:
    with client() as env:
        (tool,) = env.tools()
        assert tool["function"]["name"] == "env_action"
        parameters = tool["function"]["parameters"]
        assert set(parameters["properties"]) == {"command", "value", "number"}
        assert parameters["required"] == ["command"]


def test_environment_error_is_an_observation_and_the_session_lives(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"command": "raise", "value": "oops"})
        assert (result.observation, result.done) == ("Error: oops", False)
        assert result.info["error_kind"] == "tool"  # as in process
        assert env.step("env_action", say("still here")).observation == "still here"
        with pytest.raises(ServerError, match="oops") as caught:
            env.execute({"command": "raise", "value": "oops"})
        assert caught.value.code == "EXECUTION_ERROR"


def test_bad_field_value_is_an_observation_with_the_field(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"command": "say", "number": "many"})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert "number: Input should be a valid number" in result.observation
        with pytest.raises(ActionRefusedError) as caught:
            env.execute({"command": "say", "number": "many"})
        assert caught.value.errors[0]["loc"] == ["number"]


def test_bad_field_name_is_refused_with_the_fields_there_are(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"comand": "say"})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert "command: Field required" in result.observation
        assert "comand: Extra inputs are not permitted" in result.observation


def test_lenient_conversion_of_the_server_is_not_cut_short(client: Client) -> None:
    with client() as env:
        env.reset()
        assert env.step("env_action", {"command": "say", "number": "2.5"}).reward == 2.5


def test_unknown_tool_is_an_observation_with_the_names(client: Client) -> None:
    tools: Any = [{"type": "function", "function": {"name": "env_action"}}]
    with client(tools=tools) as env:
        env.reset()
        result = env.step("fly", {})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert "'fly'" in result.observation and "env_action" in result.observation


def test_validator_that_raises_ends_the_session_and_says_so(client: Client) -> None:
    # The server cannot put such an error into JSON, and gives the session up.
    with client() as env:
        env.reset()
        result = env.step("env_action", say("bomb"))
        assert (result.done, result.info["error_kind"]) == (True, "session_lost")
        assert "SESSION_ERROR" in result.observation
        env.reset()
        assert env.step("env_action", say("fine")).observation == "fine"


def test_environment_that_exits_ends_the_episode_and_never_goes_on_in_a_fresh_one(
    client: Client,
) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"command": "exit"})
        assert (result.done, result.info["error_kind"]) == (True, "session_lost")
        assert env.step("env_action", say("x")).done
        assert env.reset().observation == "welcome seed=None"


def test_timeout_never_goes_on_in_a_fresh_session(client: Client) -> None:
    with client(message_timeout_s=0.5) as env:
        env.reset()
        result = env.step("env_action", {"command": "sleep", "number": 1.5})
        assert (result.done, result.info["error_kind"]) == (True, "timeout")
        for _ in range(2):
            assert env.step("env_action", say("x")).info["error_kind"] == "session_lost"
        with pytest.raises(SessionClosedError, match=r"no answer to step within 0\.5 s"):
            env.execute(say("x"))


def test_timed_out_step_holds_the_only_slot_and_reset_waits_for_it(client: Client) -> None:
    with client("tight", message_timeout_s=0.5) as env:
        env.reset()
        assert env.step("env_action", {"command": "sleep", "number": 2}).done
        env.reset()
        assert env.step("env_action", say("again")).observation == "again"


def test_full_server_is_waited_out_and_refused(client: Client) -> None:
    holder = client("tight")
    holder.reset()
    with pytest.raises(CapacityError, match=r"1 of 1 sessions taken.*max_concurrent_envs"):
        client("tight", capacity_timeout_s=0).reset()
    waiting = client("tight")
    with ThreadPoolExecutor(1) as threads:
        reset = threads.submit(waiting.reset)
        holder.close()
        assert reset.result(20).observation == "welcome seed=None"
    waiting.close()


def test_close_frees_the_slot_before_it_returns(client: Client) -> None:
    for _ in range(5):
        with client("tight", capacity_timeout_s=0) as env:
            env.reset()


def test_environment_that_cannot_be_built_is_named(client: Client) -> None:
    with pytest.raises(ServerError, match="could not build BrokenEnvironment"):
        client("broken").reset()


def test_seed_and_episode_id_of_the_trajectory_arrive(client: Client) -> None:
    with client() as env:
        result = env.reset({"user_data": {"seed": 7, "episode_id": "train-1"}})
        assert result.observation == "welcome seed=7"
        assert "reset_unverified" not in result.info
        assert env.client.state().episode_id == "train-1"


def test_user_data_as_pairs_arrives(client: Client) -> None:
    with client() as env:
        pairs = [("seed", "7"), ("greeting", '"hello"')]
        assert env.reset({"user_data": pairs}).observation == "hello seed=7"


def test_reset_kwargs_attribute_may_change_between_episodes(client: Client) -> None:
    with client(reset_kwargs={"greeting": "first"}) as env:
        assert env.reset().observation.startswith("first")
        env.reset_kwargs = {"greeting": "second"}
        assert env.reset().observation.startswith("second")
        both = {"user_data": {"reset_kwargs": {"greeting": "third"}}}
        assert env.reset(both).observation.startswith("third")


@pytest.mark.parametrize("strict", [True, False])
def test_episode_id_that_the_state_does_not_repeat_is_listed(client: Client, strict: bool) -> None:
    with client("forgetful", strict_reset=strict) as env:
        for _ in range(2):
            result = env.reset({"user_data": {"episode_id": "mine", "seed": 7}})
            assert result.info["reset_ignored"] == ["episode_id"]
            assert result.info["reset_unverified"] == ["seed"]
        assert env.step("env_action", say("x")).error is None


def test_server_with_one_action_takes_it_under_any_name(client: Client) -> None:
    with client() as env:
        env.reset()
        assert env.step("move", say("left", 1.0)).reward == 1.0
        assert env.step("env_action", say("right", 2.0)).info["episode_reward"] == 3.0


def test_what_cannot_be_verified_is_listed(client: Client) -> None:
    with client("forgetful") as env:
        result = env.reset({"user_data": {"seed": 7}})
        assert result.info["reset_unverified"] == ["seed"]


def test_task_data_that_is_no_json_is_left_out_and_listed(client: Client) -> None:
    with client() as env:
        result = env.reset({"user_data": {"checker": object(), "greeting": "hi"}})
        assert result.observation.startswith("hi")
        assert result.info["reset_not_taken"] == ["checker"]


def test_reset_that_raises_is_an_error_and_the_session_lives(client: Client) -> None:
    with client() as env:
        with pytest.raises(ServerError, match="the lab exploded at reset"):
            env.reset({"user_data": {"greeting": "explode"}})
        assert env.step("env_action", say("x")).done
        assert env.reset().observation == "welcome seed=None"


def test_reset_that_reports_an_error_is_an_error(client: Client) -> None:
    with (
        client(reset_kwargs={"greeting": "unusable"}) as env,
        pytest.raises(EnvError, match="LAB_KEY is not set"),
    ):
        env.reset()


def test_missing_reward_is_flagged(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"command": "unscored"})
        assert (result.reward, result.info["reward_missing"]) == (0.0, True)


def test_metadata_is_for_programs_not_for_the_model(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", say("seen", 0.25))
        assert "hidden" not in result.observation
        assert result.info["metadata"] == {"secret": "hidden"}


def test_execute_leaves_the_episode_reward_alone(client: Client) -> None:
    with client() as env:
        env.reset()
        env.step("env_action", say("x", 0.25))
        raw = env.execute(say("scoring", 100.0))
        assert (raw.reward, raw.observation["text"], raw.observation.text) == (
            100.0,
            "scoring",
            "scoring",
        )
        assert env.last_result is raw
        assert env.episode_reward == 0.25


def test_end_of_the_episode_and_the_next_one(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"command": "end"})
        assert (result.done, result.reward, result.error) == (True, 1.0, None)
        assert env.step("env_action", say("x")).error
        env.reset()
        assert env.episode_reward == 0.0
        assert env.client.state().step_count == 0


def test_large_messages_both_ways(client: Client) -> None:
    with client(max_observation_chars=None) as env:
        env.reset()
        sent = env.step("env_action", {"command": "length", "value": "x" * 15_000_000})
        assert sent.observation == "15000000"
        got = env.step("env_action", {"command": "repeat", "value": "y" * 1000, "number": 20_000})
        assert len(got.observation) == 20_000_000


def test_action_above_the_servers_limit_is_refused_and_the_session_lives(client: Client) -> None:
    with client() as env:
        env.reset()
        result = env.step("env_action", {"command": "length", "value": "x" * 17_000_000})
        assert (result.done, result.info["error_kind"]) == (False, "tool")
        assert result.error is not None and "16777216" in result.error
        assert env.step("env_action", say("alive")).observation == "alive"


def test_action_just_below_the_servers_limit_passes(client: Client) -> None:
    with client() as env:
        env.reset()
        overhead = len('{"type":"step","data":{"command":"length","value":""}}')
        value = "x" * (16 * 2**20 - overhead)
        result = env.step("env_action", {"command": "length", "value": value})
        assert result.observation == str(len(value))


def test_observation_above_the_clients_limit_loses_the_session(client: Client) -> None:
    with client(max_message_bytes=10_000) as env:
        env.reset()
        result = env.step("env_action", {"command": "repeat", "value": "y", "number": 20_000})
        assert (result.done, result.info["error_kind"]) == (True, "session_lost")
        assert result.error is not None and "max_message_bytes=10000" in result.error


def test_long_observation_keeps_head_and_tail(client: Client) -> None:
    with client(max_observation_chars=100) as env:
        env.reset()
        text = env.step(
            "env_action", {"command": "repeat", "value": "ab", "number": 1000}
        ).observation
        assert text.startswith("abab") and text.endswith("abab")
        assert "1900 of 2000 characters cut" in text


def test_observation_renderer_replaces_the_rendering(client: Client) -> None:
    with client(observation_renderer=lambda seen: f"<{seen['text']}>") as env:
        assert env.reset().observation == "<welcome seed=None>"


def test_renderer_that_raises_fails_the_step_alone(client: Client) -> None:
    with client() as env:
        env.reset()
        env._own_renderer = lambda seen: seen["no such field"]  # pyright: ignore[reportPrivateUsage]
        result = env.step("env_action", say("x"))
        assert (result.done, result.info["error_kind"]) == (False, "env")


def test_registered_tool_runs_here(client: Client) -> None:
    info = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object"}}}

    def submit(env: Any, arguments: dict[str, Any]) -> str:
        env.submitted = arguments["answer"]
        return f"scored {env.execute(say('checked', 9.0)).reward}"

    with client() as env:
        assert env.register_tool(info, submit) is env
        env.reset()
        assert [t["function"]["name"] for t in env.tools()] == ["env_action", "submit"]
        assert env.step("submit", {"answer": 3}).observation == "scored 9.0"
        failed = env.step("submit", {})
        assert (failed.done, failed.info["error_kind"]) == (False, "tool")
        assert "KeyError" in failed.observation


async def test_registered_tools_await(client: Client) -> None:
    async def slow(env: OpenEnvClient, arguments: dict[str, Any]) -> str:
        return str((await env.aexecute(say("checked", 9.0))).reward)

    def quick(env: OpenEnvClient, arguments: dict[str, Any]) -> str:
        return str(env.execute(say("checked", 8.0)).reward)

    async with client() as env:
        env.register_tool({"function": {"name": "slow"}}, slow)
        env.register_tool({"function": {"name": "quick"}}, quick)
        await env.areset()
        assert (await env.astep("slow", {})).observation == "9.0"
        assert (await env.astep("quick", {})).observation == "8.0"
        assert env.step("slow", {}).observation == "9.0"


def test_registered_tool_overrides_one_of_the_server(client: Client) -> None:
    with client() as env:
        env.register_tool({"function": {"name": "env_action"}}, lambda env, arguments: "mine")
        env.reset()
        assert len(env.tools()) == 1
        assert env.step("env_action", say("x")).observation == "mine"


def test_action_mapper_takes_any_tool_name(client: Client) -> None:
    def shout(tool_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return say(f"{tool_name}: {arguments['words']}")

    with client(action_mapper=shout) as env:
        env.reset()
        assert env.step("shout", {"words": "hey"}).observation == "shout: hey"
        failed = env.step("shout", {})
        assert (failed.done, failed.info["error_kind"]) == (False, "tool")
        assert "KeyError" in failed.observation


def test_mcp_tools_are_listed_before_and_after_reset(client: Client) -> None:
    with client("tools") as env:
        before = env.tools()
        assert [tool["function"]["name"] for tool in before] == ["repeat", "divide"]
        assert before[0]["function"]["parameters"]["required"] == ["message"]
        env.reset()
        assert env.tools() == before
        assert env.client.state().step_count == 0


def test_mcp_calls_go_through_step(client: Client) -> None:
    with client("tools") as env:
        env.reset()
        result = env.step("repeat", {"message": "ab", "times": 2})
        assert (result.observation, result.info["reward_missing"]) == ("abab", True)
        failed = env.step("divide", {"a": 1, "b": 0})
        assert (failed.done, failed.info["error_kind"]) == (False, "tool")
        assert "division by zero" in failed.observation
        unknown = env.step("multiply", {})
        assert "repeat, divide" in unknown.observation
        bad = env.step("repeat", {"massage": "x"})
        assert (bad.done, bad.info["error_kind"]) == (False, "tool")
        assert env.client.state().step_count == 3


def test_tool_manager_drives_the_tools(client: Client) -> None:
    with client("tools") as env:
        env.reset()
        manager = ToolManager(EnvTool.from_env(env))
        call = {"function": {"name": "repeat", "arguments": '{"message": "hi", "times": 3}'}}
        assert manager(call) == "hihihi"


def test_the_sync_face_speaks_the_raw_protocol(client: Client) -> None:
    with client() as env:
        first = env.client.reset(seed=5)
        assert first.observation.text == "welcome seed=5"
        assert env.client.step(say("x", 2.0)).reward == 2.0
        assert env.episode_reward == 0.0
        assert env.client.state()["seed"] == 5
        env.client.close()
        with pytest.raises(SessionClosedError, match="closed"):
            env.client.step(say("x"))


def test_thirty_two_sessions_in_a_thread_pool_keep_apart(client: Client) -> None:
    def episode(seed: int) -> list[str]:
        with client() as env:
            first = env.reset({"user_data": {"seed": seed}}).observation
            return [
                first,
                *(env.step("env_action", say(f"{seed}.{i}")).observation for i in range(5)),
            ]

    with ThreadPoolExecutor(32) as threads:
        for seed, seen in enumerate(threads.map(episode, range(32))):
            assert seen == [f"welcome seed={seed}", *(f"{seed}.{i}" for i in range(5))]


async def test_sixty_sessions_in_one_loop_keep_apart(client: Client) -> None:
    before = threading.active_count()

    async def episode(seed: int) -> bool:
        async with client() as env:
            await env.areset({"user_data": {"seed": seed}})
            results = [await env.astep("env_action", say(f"{seed}.{i}")) for i in range(5)]
            return [r.observation for r in results] == [f"{seed}.{i}" for i in range(5)]

    assert all(await asyncio.gather(*(episode(seed) for seed in range(60))))
    assert threading.active_count() <= before + 2  # the background loop, and one for imports


def test_client_class_of_an_installed_package_is_used(
    openenv_ports: dict[str, int], word_game_package: str
) -> None:
    url = f"http://127.0.0.1:{openenv_ports['word_game']}"
    with OpenEnvClient(word_game_package, base_url=url) as env:
        result = env.reset({"user_data": {"seed": 3, "word_length": 5, "difficulty": "easy"}})
        assert result.info["client_class"] == "word_game_env.client:WordGameEnv"
        assert "client_note" not in result.info
        assert type(env.last_result.observation).__name__ == "WordGameObservation"
        step = env.step("env_action", {"guess": "crane"})
        assert env.last_result.observation.attempts_left == 7
        text = env.last_result.observation.text
        assert step.observation.startswith(f"text:\n{text}\nword_length: 5\nattempts_left: 7\n")
        assert type(env.client.state()).__name__ == "WordGameState"
        bad = env.step("env_action", {"word": "crane"})
        assert "guess: Field required" in bad.observation
        assert (bad.done, bad.info["error_kind"]) == (False, "tool")


def test_client_class_that_cannot_read_the_answers_is_not_used_unless_asked_for(
    openenv_ports: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed: it comes with the embedded extra")
    (tmp_path / "outdated_env.py").write_text(
        textwrap.dedent(
            """
            from openenv.core.client_types import StepResult
            from openenv.core.env_client import EnvClient
            from openenv.core.env_server.types import Action

            class LabAction(Action):
                command: str

            class LabEnv(EnvClient[LabAction, dict, dict]):
                def _step_payload(self, action): return action.model_dump()
                def _parse_result(self, payload): return StepResult(info={})
                def _parse_state(self, payload): return payload
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    url = f"http://127.0.0.1:{openenv_ports['lab']}"
    with OpenEnvClient("outdated_env", base_url=url) as env:
        result = env.reset()
        assert result.info["client_class"] is None
        assert "cannot read the server's answer" in result.info["client_note"]
        assert env.step("env_action", say("plain")).observation == "plain"
    with (
        OpenEnvClient(env_cls="outdated_env:LabEnv", base_url=url) as env,
        pytest.raises(EnvError, match="different versions"),
    ):
        env.reset()


def test_client_class_by_name_brings_its_action(
    openenv_ports: dict[str, int], word_game_package: str
) -> None:
    url = f"http://127.0.0.1:{openenv_ports['word_game']}"
    with OpenEnvClient(env_cls=f"{word_game_package}.client:WordGameEnv", base_url=url) as env:
        env.reset()
        assert env.step("env_action", {"guess": "crane"}).error is None


def test_environment_class_in_place_of_a_client_class_is_named(
    openenv_ports: dict[str, int], word_game_package: str
) -> None:
    path = f"{word_game_package}.server.word_game_environment:WordGameEnvironment"
    env = OpenEnvClient(env_cls=path, base_url=f"http://127.0.0.1:{openenv_ports['word_game']}")
    with pytest.raises(TypeError, match=r"OpenEnv\(env_cls"):
        env.reset()


def test_unknown_reset_argument_is_the_environments_own_complaint(
    openenv_ports: dict[str, int],
) -> None:
    url = f"http://127.0.0.1:{openenv_ports['word_game']}"
    with (
        OpenEnvClient("no_such_package", base_url=url) as env,
        pytest.raises(ServerError, match="it takes seed, episode_id"),
    ):
        env.reset({"user_data": {"reset_kwargs": {"wordlength": 5}}})


def test_reset_that_data_of_the_trajectory_may_have_failed_says_how_to_leave_it_out(
    openenv_ports: dict[str, int],
) -> None:
    url = f"http://127.0.0.1:{openenv_ports['word_game']}"
    data = {"answer": "crane", "tests": "assert 1", "word_length": 4}
    with (
        OpenEnvClient("no_such_package", base_url=url) as env,
        pytest.raises(ServerError, match=r"sent answer, tests, word_length.*reset_keys=\["),
    ):
        env.reset({"user_data": data})
    with OpenEnvClient("no_such_package", base_url=url, reset_keys=["word_length"]) as env:
        result = env.reset({"user_data": data})
        assert "4 letters" in result.observation
        assert "reset_not_taken" not in result.info
        with pytest.raises(ServerError, match="word_length is 99"):
            env.reset({"user_data": {**data, "word_length": 99}})


def test_server_killed_in_a_step_and_started_again(start_servers: Any) -> None:
    with start_servers("openenv_servers.py", "lab") as (ports, process):
        env = OpenEnvClient(
            "no_such_package", base_url=f"http://127.0.0.1:{ports['lab']}", message_timeout_s=20
        )
        env.reset()
        with ThreadPoolExecutor(1) as threads:
            step = threads.submit(env.step, "env_action", {"command": "sleep", "number": 15})
            with pytest.raises(TimeoutError):
                step.result(0.5)  # it is running
            os.kill(process.pid, signal.SIGKILL)
            result = step.result(10)
    assert (result.done, result.info["error_kind"]) == (True, "session_lost")
    assert env.step("env_action", say("x")).info["error_kind"] == "session_lost"
    with pytest.raises((SessionClosedError, EnvTimeoutError)):
        env.reset()
    env.close()
