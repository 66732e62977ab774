"""Steps on a sandbox that lives."""

# The fixtures of conftest.py have no type that a test could import.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from typing import Any

import pytest

from twinkle_agentic.envs.agentenv import ToolFaultError
from twinkle_agentic.envs.agentenv._handle import live_handles
from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.envs.errors import SandboxError
from twinkle_agentic.tools.tool_manager import ToolManager


@pytest.fixture
def env(make_env: Any) -> Any:
    made = make_env(command_timeout=20)
    made.reset()
    return made


def schema(name: Any, **properties: Any) -> Any:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }


def names(env: Any) -> Any:
    return [info["function"]["name"] for info in env.tools()]


def test_the_document_s_command(env: Any) -> None:
    result = env.step("run_command", {"command": 'python3 -c "print(1 + 1)"'})
    assert result.observation == "2"
    assert (result.reward, result.done, result.error) == (0.0, False, None)
    assert result.info == {"sandbox_id": env.sandbox_id, "exit_code": 0, "reward_missing": True}


def test_a_failing_command_is_an_observation_and_no_error(env: Any) -> None:
    result = env.step("run_command", {"command": "echo out; echo err >&2; exit 3"})
    assert result.observation == "out\n[stderr]\nerr\n[exit code 3]"
    assert (result.done, result.error, result.info["exit_code"]) == (False, None, 3)


def test_envs_and_cwd(make_env: Any) -> None:
    env = make_env(sandbox_envs={"WHO": "me"})
    env.reset()
    assert env.step("run_command", {"command": "echo $WHO; pwd", "cwd": "/tmp"}).observation == (
        "me\n/tmp"
    )


def test_files(env: Any) -> None:
    wrote = env.step("write_file", {"path": "/d/e/f.txt", "content": "héé\r\n你\n"})
    assert wrote.observation == "Wrote 7 characters to /d/e/f.txt."
    assert env.step("read_file", {"path": "/d/e/f.txt"}).observation == "héé\r\n你\n"
    assert env.step("write_file", {"path": "/empty", "content": ""}).error is None
    assert env.step("read_file", {"path": "/empty"}).observation == ""


def test_files_that_are_no_text(env: Any) -> None:
    env.write_file("/b", bytes(range(256)) * 5000)
    assert env.read_file("/b") == bytes(range(256)) * 5000
    text = env.step("read_file", {"path": "/b"}).observation
    text.encode()
    assert "characters cut" in text


def test_lone_surrogates_can_be_written_and_run(env: Any) -> None:
    assert env.step("write_file", {"path": "/s", "content": "a\ud800b"}).error is None
    assert env.step("read_file", {"path": "/s"}).observation == "a\ufffdb"
    assert env.step("run_command", {"command": "echo '\ud800'"}).observation == "\ufffd"


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("nope", {}, "unknown tool 'nope': available are run_command, write_file, read_file"),
        ("run_command", {}, "argument 'command' must be text, found nothing"),
        ("run_command", {"command": ["ls"]}, "must be text, found list"),
        ("run_command", {"command": ""}, "'command' is empty"),
        ("run_command", {"command": "ls", "cwd": 3}, "argument 'cwd' must be text, found int"),
        ("run_command", {"command": "ls", "cwd": "/nope"}, "'/nope' does not exist"),
        ("run_command", {"command": "echo a\0b"}, "NUL"),
        ("run_command", {"command": "#" * 140_000}, "write it to a file"),
        ("run_command", "ls", "must be an object, found str"),
        ("run_command", {"command": "ls", "timeout": "soon"}, "a timeout must be a number"),
        (
            "run_command",
            {"command": "ls", "env": {}, "user": "x"},
            "'run_command' takes no 'env', 'user': it takes 'command', 'cwd', 'timeout'",
        ),
        (
            "write_file",
            {"path": "/x", "content": "x", "mode": "a"},
            "'write_file' takes no 'mode': it takes 'path', 'content'",
        ),
        ("read_file", {"path": "/x", "offset": 1}, "takes no 'offset': it takes 'path'"),
        ("write_file", {"path": "/x"}, "argument 'content' must be text"),
        ("write_file", {"path": "", "content": "x"}, "'path' is empty"),
        ("read_file", {"path": "/missing"}, "does not exist"),
        ("read_file", {}, "argument 'path'"),
    ],
)
def test_a_bad_action_is_an_observation_and_the_episode_goes_on(
    env: Any, tool: Any, arguments: Any, words: Any
) -> None:
    result = env.step(tool, arguments)
    assert result.observation.startswith("Error: ")
    assert words in result.observation
    assert (result.done, result.info["error_kind"]) == (False, "tool")
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_output_that_is_no_utf8(env: Any) -> None:
    result = env.step("run_command", {"command": "printf '\\377\\376ok\\303'"})
    assert result.observation == "\ufffd\ufffdok\ufffd"


def test_a_hundred_kilobytes_of_non_ascii_keep_their_characters(env: Any) -> None:
    result = env.exec("python3 -c \"print('你好🎉' * 10000)\"")
    assert result.stdout == "你好🎉" * 10_000 + "\n"
    seen = env.step("run_command", {"command": "python3 -c \"print('你好🎉' * 20000)\""})
    assert "\ufffd" not in seen.observation
    assert "[... 27232 of 60000 characters cut ...]" in seen.observation


def test_exec_gives_the_parts(env: Any) -> None:
    result = env.exec("echo out; echo err >&2; exit 4", envs={"X": "1"})
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 4)
    assert result.duration_s > 0
    assert not result.timed_out


def test_a_timed_out_command_keeps_its_output_and_is_killed_with_its_children(env: Any) -> None:
    run = env.exec(
        "echo begun; echo oops >&2; (sleep 61 & setsid sleep 62 & wait); echo never", timeout_s=1
    )
    assert (run.timed_out, run.exit_code) == (True, None)
    assert (run.stdout, run.stderr) == ("begun\n", "oops\n")
    left = env.exec("for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline; echo; done 2>/dev/null")
    assert "sleep 61" not in left.stdout
    assert "sleep 62" not in left.stdout


def test_a_timed_out_step_is_no_error(make_env: Any) -> None:
    env = make_env(command_timeout=1)
    env.reset()
    result = env.step("run_command", {"command": "echo begun; sleep 60"})
    assert result.observation == "begun\n[killed: no end within 1 s]"
    assert (result.done, result.error) == (False, None)
    assert result.info["timed_out"] is True
    assert result.info["exit_code"] is None
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_a_background_process_that_holds_the_output_is_explained(make_env: Any) -> None:
    env = make_env(command_timeout=1)
    env.reset()
    held = env.step("run_command", {"command": "echo begun; sleep 60 &"})
    assert held.observation.startswith("begun\n[killed: no end within 1 s; to leave a process")
    free = env.step("run_command", {"command": "sleep 60 > /dev/null 2>&1 & echo begun"})
    assert free.observation == "begun"


def test_a_step_may_ask_for_less_time(env: Any) -> None:
    result = env.step("run_command", {"command": "echo begun; sleep 60", "timeout": 1})
    assert result.observation == "begun\n[killed: no end within 1 s]"
    assert (result.done, result.error, result.info["timed_out"]) == (False, None, True)


def test_arguments_that_are_refused_do_nothing(env: Any) -> None:
    env.step("write_file", {"path": "/kept", "content": "old"})
    env.step("write_file", {"path": "/kept", "content": "new", "mode": "a"})
    assert env.step("read_file", {"path": "/kept"}).observation == "old"


@pytest.mark.parametrize("timeout", [9999, None])
def test_a_step_gets_no_more_time_than_command_timeout(
    server: Any, env: Any, timeout: float | None
) -> None:
    env.step("run_command", {"command": "true", "timeout": timeout})
    starts = [r for r in server.requests if r[1] == "/process.Process/Start"]
    assert starts[-1][2]["connect-timeout-ms"] == "20000"


def test_command_timeout_reaches_the_server(server: Any, env: Any) -> None:
    env.run_command({"command": "true", "timeout": 33})
    starts = [r for r in server.requests if r[1] == "/process.Process/Start"]
    assert starts[-1][2]["connect-timeout-ms"] == "33000"


def test_default_tools_may_be_hidden(make_env: Any) -> None:
    env = make_env(include_default_tools=False)
    env.register_tool(schema("submit"), lambda env, arguments: "Solution submitted.")
    assert names(env) == ["submit"]
    env.reset()
    refused = env.step("run_command", {"command": "ls"})
    assert refused.observation == "Error: unknown tool 'run_command': available are submit"


def test_registration_chains_and_overrides(env: Any) -> None:
    same = env.register_tool(schema("submit"), lambda e, a: "first").register_command_tool(
        schema("run_command", command={"type": "string"}), "echo own {command}"
    )
    assert same is env
    env.register_tool(schema("submit"), lambda e, a: "second")
    assert names(env) == ["write_file", "read_file", "run_command", "submit"]
    assert env.step("submit", {}).observation == "second"
    assert env.step("run_command", {"command": "a; b"}).observation == "own a; b"


def test_a_tool_without_a_name_is_refused(env: Any) -> None:
    with pytest.raises(ValueError, match=r"function\.name"):
        env.register_tool({"type": "function", "function": {}}, lambda e, a: "")


def test_a_command_tool_quotes_its_arguments(env: Any) -> None:
    env.register_command_tool(schema("show", text={"type": "string"}), "printf %s {text}")
    assert env.step("show", {"text": "a'; echo $(id) {x}"}).observation == "a'; echo $(id) {x}"
    missing = env.step("show", {})
    assert missing.observation == "Error: missing argument 'text'"
    assert (missing.done, missing.info["error_kind"]) == (False, "tool")


def test_a_command_tool_reports_its_exit_code(env: Any) -> None:
    env.register_command_tool(schema("fail"), "exit 5")
    assert env.step("fail", {}).info["exit_code"] == 5


def test_a_handler_hands_the_exit_code_of_a_command_on(env: Any) -> None:
    def graded(env: Any, arguments: Any) -> Any:
        output = env.run_command({"command": "echo seen; exit 7"})
        return StepResult(output, 1.0 if output.exit_code == 7 else 0.0)

    env.register_tool(schema("t"), graded)
    result = env.step("t", {})
    assert (result.reward, result.info["exit_code"]) == (1.0, 7)
    assert (type(result.observation), result.observation) == (str, "seen\n[exit code 7]")


def test_a_result_that_a_handler_returns_again_is_not_changed(env: Any) -> None:
    again = StepResult("x" * 50_000, 1.0)
    env.register_tool(schema("t"), lambda e, a: again)
    for _ in range(2):
        assert env.step("t", {}).info == {"sandbox_id": env.sandbox_id}
    assert (len(again.observation), again.info) == (50_000, {})


def test_the_output_of_a_command_tool_is_cut_once(env: Any) -> None:
    env.register_command_tool(schema("flood"), "head -c 50000 /dev/zero | tr '\\0' x")
    seen = env.step("flood", {}).observation
    assert seen.count("characters cut") == 1
    assert "[... 17232 of 50000 characters cut ...]" in seen


def test_a_command_tool_has_a_limit_of_its_own(server: Any, env: Any) -> None:
    env.register_command_tool(schema("slow"), "true", timeout_s=7)
    env.step("slow", {})
    starts = [r for r in server.requests if r[1] == "/process.Process/Start"]
    assert starts[-1][2]["connect-timeout-ms"] == "7000"


def test_a_handler_uses_the_sandbox(env: Any) -> Any:
    def submit(env: Any, arguments: Any) -> Any:
        env.submitted = arguments["code"]
        return env.run_command({"command": f"echo got {len(arguments['code'])}"})

    env.register_tool(schema("submit", code={"type": "string"}), submit)
    assert env.step("submit", {"code": "abc"}).observation == "got 3"
    assert env.submitted == "abc"


@pytest.mark.parametrize(
    ("answer", "observation"),
    [(None, ""), ({"a": [1]}, '{"a": [1]}'), (3, "3"), ("x\ud800", "x\ufffd")],
)
def test_what_a_handler_returns_becomes_text(env: Any, answer: Any, observation: Any) -> None:
    env.register_tool(schema("t"), lambda e, a: answer)
    assert env.step("t", {}).observation == observation


def test_a_handler_s_long_text_is_truncated(env: Any) -> None:
    env.register_tool(schema("t"), lambda e, a: "x" * 50_000)
    assert "[... 17232 of 50000 characters cut ...]" in env.step("t", {}).observation


def test_a_handler_may_give_a_reward_and_end_the_episode(env: Any) -> None:
    env.register_tool(schema("t"), lambda e, a: StepResult("well done", 1.0, True))
    result = env.step("t", {})
    assert (result.observation, result.reward, result.done) == ("well done", 1.0, True)
    assert result.info["sandbox_id"] == env.sandbox_id


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("run_command", {"command": "exit 3"}),
        ("run_command", {"command": "sleep 60"}),
        ("write_file", {"path": "/x", "content": ""}),
        ("read_file", {"path": "/there"}),
        ("text", {}),
    ],
)
def test_a_sandbox_gives_no_reward(make_env: Any, tool: Any, arguments: Any) -> None:
    env = make_env(command_timeout=1)
    env.register_tool(schema("text"), lambda e, a: "a handler's text")
    env.reset()
    env.write_file("/there", "x")
    result = env.step(tool, arguments)
    assert (result.reward, result.info["reward_missing"]) == (0.0, True)


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_a_reward_of_a_handler_is_one(env: Any, reward: Any) -> None:
    env.register_tool(schema("t"), lambda e, a: StepResult("seen", reward))
    result = env.step("t", {})
    assert (result.reward, "reward_missing" in result.info) == (reward, False)


def test_what_a_failed_step_earned_is_not_the_question(env: Any) -> None:
    assert "reward_missing" not in env.step("read_file", {"path": "/missing"}).info


def test_a_handler_that_raises_is_an_observation(env: Any) -> None:
    env.register_tool(schema("t"), lambda e, a: 1 / 0)
    result = env.step("t", {})
    assert result.observation == "Error: ZeroDivisionError: division by zero"
    assert (result.done, result.info["error_kind"]) == (False, "tool")


def test_a_handler_that_exits_is_an_observation(env: Any) -> None:
    env.register_tool(schema("t"), lambda e, a: exit(3))
    result = env.step("t", {})
    assert (result.done, result.info["error_kind"]) == (False, "tool")
    assert "SystemExit" in result.observation


def test_step_before_reset_and_after_close(make_env: Any) -> None:
    env = make_env()
    assert env.sandbox is None
    before = env.step("run_command", {"command": "ls"})
    assert before.done
    assert "call reset() first" in before.observation
    with pytest.raises(SandboxError, match="call reset"):
        env.exec("ls")
    env.reset()
    env.close()
    env.close()
    assert env.sandbox_id is None
    assert env.step("run_command", {"command": "ls"}).done


def test_evaluate_gives_zeros(make_env: Any) -> None:
    assert make_env().evaluate([{}, {}]) == [0.0, 0.0]


async def test_async_twins(make_env: Any) -> None:
    async with make_env(setup_commands=["echo ready"]) as env:
        assert (await env.areset()).observation == "ready"
        assert (await env.astep("run_command", {"command": "echo a"})).observation == "a"
    assert env.sandbox_id is None


def test_as_tools_of_a_manager(env: Any) -> None:
    tools = EnvTool.from_env(env)
    manager = ToolManager(tools)
    call = {"function": {"name": "run_command", "arguments": '{"command": "echo hello"}'}}
    assert manager(call) == "hello"
    last = tools[1].last_result
    assert last is not None
    assert last.observation == "hello"
    wrong = {"function": {"name": "read_file", "arguments": "{}"}}
    assert "'path' is a required property" in manager(wrong)


def test_a_long_file_is_refused_to_the_trainer(env: Any) -> None:
    from twinkle_agentic.envs.agentenv._files import read_bytes

    handle, *_ = live_handles()
    env.write_file("/long", b"x" * 5_000)
    assert len(env.read_file("/long")) == 5_000
    with pytest.raises(ToolFaultError, match="longer than 4999 bytes"):
        read_bytes(handle, "/long", max_bytes=4_999)
    assert env.step("run_command", {"command": "echo on"}).observation == "on"
