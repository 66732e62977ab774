"""The blocks of the document that need core alone, as printed there."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.tools.base import ToolInfo

ENV_CLASS = '''
from twinkle_agentic.envs.base import Env, StepResult

class Env(ABC):

    def reset(self, trajectory=None) -> StepResult:
        """重置环境，开始新一轮。"""

    @abstractmethod
    def step(self, tool_name: str, arguments: dict) -> StepResult:
        """执行单个动作，返回观测 + 奖励 + 完成标志。"""

    def tools(self) -> List[ToolInfo]:
        """返回此环境中可用的工具定义。"""

    def evaluate(self, trajectories, **kwargs) -> List[float]:
        """批量评估已完成的轨迹，返回奖励列表。"""

    def close(self) -> None:
        """释放资源。"""
'''

STEP_RESULT = """
@dataclass
class StepResult:
    observation: str = ''    # 动作执行后的环境观测
    reward: float = 0.0      # 此步骤的标量奖励
    done: bool = False        # 是否终止
    info: Dict[str, Any] = field(default_factory=dict)  # 额外元数据
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


def run(block: str, **names: Any) -> dict[str, Any]:
    """Execute a block with the names it takes for granted; returns all names afterwards."""
    exec(compile(block, "<document>", "exec"), names)
    return names


def test_base_class_has_the_printed_methods() -> None:
    printed = run(ENV_CLASS, ABC=ABC, abstractmethod=abstractmethod, List=list, ToolInfo=ToolInfo)
    methods = ["reset", "step", "tools", "evaluate", "close"]
    cls: Any = printed["Env"]
    assert [name for name in cls.__dict__ if not name.startswith("_")] == methods
    for name in methods:
        shown = inspect.signature(getattr(printed["Env"], name))
        assert list(shown.parameters) == list(inspect.signature(getattr(Env, name)).parameters)
    assert Env.__abstractmethods__ == printed["Env"].__abstractmethods__


def test_step_result_has_the_printed_fields() -> None:
    printed = run(STEP_RESULT, dataclass=dataclass, field=field, Dict=dict, Any=Any)["StepResult"]
    shown = [(f.name, getattr(printed(), f.name)) for f in dataclasses.fields(printed)]
    assert [
        (f.name, getattr(StepResult(), f.name)) for f in dataclasses.fields(StepResult)
    ] == shown


def test_interactive_mode() -> None:
    scope = run(INTERACTIVE, MyEnv=MyEnv, trajectory={"messages": []})
    assert scope["env"].trajectory == {"messages": []}
    assert scope["result"] == StepResult("search Python", 1.0, True)


def test_evaluation_mode() -> None:
    scope = run(EVALUATION, env=MyEnv(), completed_trajectories=[{"messages": [1, 2]}])
    assert scope["rewards"] == [2.0]


def test_env_tools_in_a_manager() -> None:
    scope = run(FROM_ENV, MyEnv=MyEnv)
    tool_call = {"function": {"name": "search", "arguments": '{"query": "Python"}'}}
    assert scope["manager"](tool_call) == "search Python"
    (tool,) = scope["env_tools"]
    assert (tool.done, tool.episode_reward) == (True, 1.0)
    assert tool.last_result == StepResult("search Python", 1.0, True)


def test_env_tool_made_by_hand() -> None:
    scope = run(BY_HAND, EnvTool=EnvTool, my_env=MyEnv())
    function = scope["env_tool"].tool_info()["function"]
    assert (function["name"], function["description"]) == (
        "execute_code",
        "在沙箱中执行 Python 代码。",
    )
    assert function["parameters"]["required"] == ["code"]


def test_custom_environment() -> None:
    sandboxes: list[Sandbox] = []

    def create_sandbox() -> Sandbox:
        sandboxes.append(Sandbox())
        return sandboxes[-1]

    scope = run(CUSTOM_ENVIRONMENT, create_sandbox=create_sandbox)
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
    scope = run(CUSTOM_ENVIRONMENT, create_sandbox=Sandbox)
    async with scope["CodeExecutionEnv"]() as env:
        await env.areset()
        assert (await env.astep("execute_code", {"code": "1"})).observation == "ran 1"
