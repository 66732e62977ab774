"""The document's AgentEnv chapter, its code as printed, against the local sandbox server."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import pytest

from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.rollout.testing import ServerProcess
from twinkle_agentic.tools.tool_manager import ToolManager

pytestmark = pytest.mark.integration

EPISODE = """
from twinkle_agentic.envs import AgentEnv

env = AgentEnv(
    template='my-env',                     # 预先用 aenv CLI 构建的模板
    api_url='http://10.0.0.5:8000',        # server 或 gateway；缺省读 E2B_API_URL
    sandbox_timeout=600,                   # 需大于单个 episode 加测试回放的耗时
)
env.reset()                                # 启动一个新沙箱，由 scheduler 选节点
result = env.step('run_command', {'command': 'python -c "print(1 + 1)"'})
print(result.observation)                  # '2'
env.close()                                # 销毁沙箱
"""

TOOLS = """
# 1. shell 命令模板，用工具参数格式化
env.register_command_tool(
    {'type': 'function', 'function': {
        'name': 'run_tests',
        'description': '运行任务测试集。',
        'parameters': {'type': 'object',
                       'properties': {'test_file': {'type': 'string'}},
                       'required': ['test_file']}}},
    'cd /workspace && pytest {test_file} -x -q')

# 2. 任意 Python handler：handler(env, arguments) -> str
def _submit(env, arguments):
    env.submitted_code = arguments.get('code', '')
    return 'Solution submitted.'

env.register_tool(submit_schema, _submit)      # 两者均返回 self，可链式调用
"""

SUBMIT = {
    "type": "function",
    "function": {
        "name": "submit_solution",
        "description": "Hand in the solution.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}


def as_printed(block: str, url: str) -> str:
    """The document's server is not here: its address and template are those of the local one."""
    return block.replace("http://10.0.0.5:8000", url).replace("'my-env'", "'base'")


def test_the_episode_block(sandbox_server: ServerProcess) -> None:
    before = dict(os.environ)
    printed = io.StringIO()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        exec(as_printed(EPISODE, sandbox_server.url), names)
    assert printed.getvalue() == "2\n"
    assert names["env"].sandbox_id is None
    assert dict(os.environ) == before


def test_the_url_from_the_environment_alone(
    sandbox_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinkle_agentic.envs import AgentEnv

    for name in ("E2B_SANDBOX_URL", "E2B_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("E2B_API_URL", sandbox_server.url)
    with AgentEnv(template="base") as env:
        env.reset()
        assert env.step("run_command", {"command": "echo here"}).observation == "here"


def test_the_registration_block(sandbox_server: ServerProcess) -> None:
    from twinkle_agentic.envs import AgentEnv

    with AgentEnv(template="base", api_url=sandbox_server.url) as env:
        exec(TOOLS, {"env": env, "submit_schema": SUBMIT})
        assert [info.get("function", {}).get("name") for info in env.tools()] == [
            "run_command",
            "write_file",
            "read_file",
            "run_tests",
            "submit_solution",
        ]
        env.reset()
        # The directory is the document's template's, not the bare host's.
        shown = env.step("run_tests", {"test_file": "a b; c.py"}).observation
        assert "/workspace" in shown
        assert "[exit code 1]" in shown
        manager = ToolManager(EnvTool.from_env(env))
        call = {"function": {"name": "submit_solution", "arguments": '{"code": "x = 1"}'}}
        assert manager(call) == "Solution submitted."
        assert vars(env)["submitted_code"] == "x = 1"


def test_the_table_of_arguments(sandbox_server: ServerProcess) -> None:
    from twinkle_agentic.envs import AgentEnv

    env = AgentEnv(
        template="base",
        api_url=sandbox_server.url,
        api_key="any",
        sandbox_timeout=300,
        command_timeout=120,
        setup_commands=["echo setting up", "echo $TASK"],
        sandbox_envs={"TASK": "sort"},
        metadata={"run": "table"},
        refresh_timeout=True,
        include_default_tools=False,
    )
    with env:
        assert env.reset().observation == "setting up\nsort"
        assert env.tools() == []
        assert env.sandbox is not None
        assert env.sandbox.get_info().metadata["run"] == "table"
        assert env.run_command({"command": "exit 3"}) == "[exit code 3]"
        assert env.evaluate([{}]) == [0.0]


def test_a_run_of_pytest_where_the_template_has_one(sandbox_server: ServerProcess) -> None:
    """The document's `run_tests`, in a directory a sandbox's user may write."""
    from twinkle_agentic.envs import AgentEnv

    with AgentEnv(template="base", api_url=sandbox_server.url) as env:
        block = TOOLS.replace("/workspace", "~/workspace").replace("pytest", "./pytest")
        exec(block, {"env": env, "submit_schema": SUBMIT})
        env.reset()
        env.write_file("workspace/pytest", "#!/bin/sh\nprintf '<%s>' \"$@\"\n")
        env.exec("chmod +x ~/workspace/pytest")
        shown = env.step("run_tests", {"test_file": "a b; $(id).py"}).observation
        assert shown == "<a b; $(id).py><-x><-q>"
