"""The blocks of the document that need core alone, as printed there."""

from __future__ import annotations

from typing import Any

import pytest

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool

CUSTOM_ENVIRONMENT = """
from twinkle_agentic.envs.base import Env, StepResult

class CodeExecutionEnv(Env):

    def reset(self, trajectory=None):
        self._sandbox = create_sandbox()
        return StepResult(observation='沙箱已就绪。')

    def step(self, tool_name, arguments):
        code = arguments.get('code', '')
        output = self._sandbox.run(code)
        return StepResult(
            observation=output,
            reward=1.0 if 'error' not in output.lower() else 0.0,
            done=False,
        )

    def tools(self):
        return [{
            'type': 'function',
            'function': {
                'name': 'execute_code',
                'description': '运行 Python 代码。',
                'parameters': {
                    'type': 'object',
                    'properties': {
                        'code': {'type': 'string'},
                    },
                },
            },
        }]

    def close(self):
        self._sandbox.cleanup()
"""

INTERACTIVE = """
env = MyEnv()
env.reset(trajectory)
result = env.step('search', {'query': 'Python'})
# ... 重复直到 result.done
"""

EVALUATION = """
rewards = env.evaluate(completed_trajectories)
"""

FROM_ENV = """
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.tools.tool_manager import ToolManager

env = MyEnv()

# 为环境中定义的每个工具创建一个 EnvTool
env_tools = EnvTool.from_env(env)

# 注册到 ToolManager
manager = ToolManager(env_tools)
"""

BY_HAND = """
env_tool = EnvTool(
    env=my_env,
    tool_name='execute_code',
    description='在沙箱中执行 Python 代码。',
    parameters={
        'type': 'object',
        'properties': {
            'code': {'type': 'string', 'description': '要执行的 Python 代码。'},
        },
        'required': ['code'],
    },
)
"""


class MyEnv(Env):
    def reset(self, trajectory: Any = None) -> StepResult:
        self.trajectory = trajectory
        return StepResult("ready")

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        return StepResult(f"{tool_name} {arguments['query']}", 1.0, True)

    def tools(self) -> list[Any]:
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
        return [{"type": "function", "function": {"name": "search", "parameters": parameters}}]

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [float(len(trajectory["messages"])) for trajectory in trajectories]


class Sandbox:
    def __init__(self) -> None:
        self.clean = False

    def run(self, code: str) -> str:
        return "NameError: x" if code == "x" else f"ran {code}"

    def cleanup(self) -> None:
        self.clean = True


def test_custom_environment() -> None:
    sandboxes: list[Sandbox] = []

    def create_sandbox() -> Sandbox:
        sandboxes.append(Sandbox())
        return sandboxes[-1]

    scope: dict[str, Any] = {"create_sandbox": create_sandbox}
    exec(CUSTOM_ENVIRONMENT, scope)
    with scope["CodeExecutionEnv"]() as env:
        assert env.reset() == StepResult("沙箱已就绪。")
        (tool,) = EnvTool.from_env(env)
        assert tool.tool_info() == env.tools()[0]
        assert tool("execute_code", {"code": "1"}) == "ran 1"
        assert tool.episode_reward == 1.0
        assert tool("execute_code", {"code": "x"}) == "NameError: x"
        assert (tool.episode_reward, tool.done) == (0.0, False)
    assert [sandbox.clean for sandbox in sandboxes] == [True]


async def test_custom_environment_has_its_async_twins() -> None:
    scope: dict[str, Any] = {"create_sandbox": Sandbox}
    exec(CUSTOM_ENVIRONMENT, scope)
    async with scope["CodeExecutionEnv"]() as env:
        await env.areset()
        assert (await env.astep("execute_code", {"code": "1"})).observation == "ran 1"


def test_interactive_mode() -> None:
    scope: dict[str, Any] = {"MyEnv": MyEnv, "trajectory": {"messages": []}}
    exec(INTERACTIVE, scope)
    assert scope["env"].trajectory == {"messages": []}
    assert scope["result"] == StepResult("search Python", 1.0, True)


def test_evaluation_mode() -> None:
    scope: dict[str, Any] = {"env": MyEnv(), "completed_trajectories": [{"messages": [1, 2]}]}
    exec(EVALUATION, scope)
    assert scope["rewards"] == [2.0]


def test_env_tools_in_a_manager() -> None:
    scope: dict[str, Any] = {"MyEnv": MyEnv}
    exec(FROM_ENV, scope)
    tool_call = {"function": {"name": "search", "arguments": '{"query": "Python"}'}}
    assert scope["manager"](tool_call) == "search Python"
    (tool,) = scope["env_tools"]
    assert (tool.done, tool.episode_reward) == (True, 1.0)
    assert tool.last_result == StepResult("search Python", 1.0, True)


def test_env_tool_made_by_hand() -> None:
    scope: dict[str, Any] = {"EnvTool": EnvTool, "my_env": MyEnv()}
    exec(BY_HAND, scope)
    function = scope["env_tool"].tool_info()["function"]
    assert (function["name"], function["description"]) == (
        "execute_code",
        "在沙箱中执行 Python 代码。",
    )
    assert function["parameters"]["required"] == ["code"]


@pytest.mark.parametrize("method", ["reset", "step", "tools", "evaluate", "close"])
def test_base_class_has_the_methods_of_the_document(method: str) -> None:
    assert callable(getattr(Env, method))
