"""The blocks of the document that need more than core, as printed there and in its order.

Each is executed with real parts. Only what no test can have is replaced: the address of the
author's server, and the package `openspiel_env`, which is on no index (a small game of that name is
written by the test). Core's own tests execute the blocks that need core alone; the chapter on
`AgentEnv` has a test file of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.protocol.openai import OpenAI
from twinkle_agentic.rollout.testing import ServerProcess
from twinkle_agentic.tools.base import ToolInfo

pytestmark = pytest.mark.integration

THE_ADDRESS = "http://10.0.0.5:8000"

EMBEDDED = """
from twinkle_agentic.envs.openenv import OpenEnv

env = OpenEnv(
    env_name='openspiel_env',                  # 环境包名，自动发现 Environment / Action 类
    env_kwargs={'game_name': 'blackjack'},     # 传给 Environment 构造函数
)
result = env.reset()
result = env.step('play', {'action': 'hit'})
"""

CLIENT = """
from twinkle_agentic.envs.openenv import OpenEnvClient

env = OpenEnvClient(
    env_name='coding_env',                 # 自动发现 EnvClient 子类 + Action 类
    base_url='http://10.0.0.5:8000',       # 也可用 OPENENV_BASE_URL 环境变量
    message_timeout_s=120,                 # 环境要跑长耗时代码时调大
)
env.reset()
result = env.step('run_python', {'code': 'print(1 + 1)'})
print(result.observation)                  # '2'
env.close()
"""

ROLLOUT = """
from twinkle_agentic.envs.env_tool import EnvTool
from twinkle_agentic.tools.tool_manager import ToolManager
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout

env.reset()

# 桥接到 ToolManager
env_tools = EnvTool.from_env(env)
manager = ToolManager(env_tools)

# 在 rollout 中使用
rollout = APIMultiTurnRollout(api=api, tool_manager=manager, max_turns=10)
results = rollout(trajectories)
"""

POOL = """
from twinkle_agentic.envs.openenv import EnvPool

pool = EnvPool(
    pool_size=64,
    device_mesh=mesh,
    env_kwargs={'env_name': 'openspiel_env', 'env_kwargs': {'game_name': 'blackjack'}},
)

# 每个槽位包装成一个标准 Env，可直接交给 EnvTool / ToolManager
envs = pool.get_adapters(64)
env_tools = EnvTool.from_env(envs[0])
"""

GAME = '''
"""A game of the shape of OpenSpiel's blackjack: draw until 21, or stand."""

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from openspiel_env.models import OpenSpielAction, OpenSpielObservation


class OpenSpielEnvironment(Environment[OpenSpielAction, OpenSpielObservation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, game_name="catch"):
        super().__init__()
        self.game_name = game_name
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.total = 12
        return self._seen()

    def step(self, action, timeout_s=None, **kwargs):
        self.total += 9 if action.action == "hit" else 0
        return self._seen(done=True, reward=1.0 if self.total == 21 else -1.0)

    def _seen(self, **outcome):
        return OpenSpielObservation(text=f"{self.game_name}: {self.total}", **outcome)

    @property
    def state(self):
        return self._state
'''

MODELS = '''
"""Action and observation."""

from openenv.core.env_server.types import Action, Observation


class OpenSpielAction(Action):
    action: str


class OpenSpielObservation(Observation):
    text: str = ""
'''

PACKAGE = """
from openspiel_env.models import OpenSpielAction, OpenSpielObservation

__all__ = ["OpenSpielAction", "OpenSpielObservation"]
"""

SUBMIT: ToolInfo = {
    "type": "function",
    "function": {
        "name": "submit_solution",
        "description": "Hand in the solution.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}


def run(block: str, **names: Any) -> dict[str, Any]:
    """Execute a block with the names it takes for granted; returns all names afterwards."""
    exec(compile(block, "<document>", "exec"), names)
    return names


@pytest.fixture
def openspiel_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__.py": PACKAGE,
        "models.py": MODELS,
        "server/__init__.py": "",
        "server/openspiel_environment.py": GAME,
    }
    for name, text in files.items():
        path = tmp_path / "openspiel_env" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # of Ray's workers
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.usefixtures("openspiel_env")
def test_embedded_openenv() -> None:
    names = run(EMBEDDED)
    with names["env"] as env:
        result = names["result"]
        assert (result.reward, result.done) == (1.0, True)
        assert "blackjack: 21" in result.observation
        assert env.tools() == []
        (tool,) = EnvTool.from_env(env)
        assert tool.tool_info().get("function", {}).get("name") == "env_action"
        env.reset()
        assert "blackjack: 12" in tool("env_action", {"action": "stand"})
        assert (tool.done, tool.episode_reward) == (True, -1.0)


def test_openenv_client(coding_server: ServerProcess) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = run(CLIENT.replace(THE_ADDRESS, coding_server.url))
    assert printed.getvalue() == "2\n"
    assert names["result"].info.get("error") is None


def test_openenv_client_with_the_address_of_the_environment(
    coding_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_BASE_URL", coding_server.url)
    line = f"    base_url='{THE_ADDRESS}',       # 也可用 OPENENV_BASE_URL 环境变量\n"
    assert line in CLIENT
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(CLIENT.replace(line, ""))
    assert printed.getvalue() == "2\n"


def test_rollout(coding_server: ServerProcess, scripted_endpoint: ServerProcess) -> None:
    from twinkle_agentic.envs.openenv import OpenEnvClient

    submitted: list[str] = []

    def submit(env: Any, arguments: dict[str, Any]) -> str:
        submitted.append(arguments["code"])
        return "Solution submitted."

    with OpenEnvClient(env_name="coding_env", base_url=coding_server.url) as env:
        env.register_tool(SUBMIT, submit)
        question = "Write the function `add(a, b)` that adds two numbers."
        names = run(
            ROLLOUT,
            env=env,
            api=OpenAI("scripted", base_url=f"{scripted_endpoint.url}/v1"),
            trajectories=[{"messages": [{"role": "user", "content": question}]}],
        )
        (result,) = names["results"]
        assert ["return a + b" in code for code in submitted] == [True]
    assert [message["role"] for message in result["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert result["messages"][2]["content"] == "Solution submitted."
    assert (result["stop_reason"], result["turns"], result["error"]) == ("stop", 2, None)


@pytest.fixture
def own_cluster(openspiel_env: None) -> Iterator[None]:
    """A local Ray cluster for this test alone, whose workers find the package."""
    ray: Any = pytest.importorskip("ray", reason="ray is not installed: see the ray extra")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("own_cluster")
def test_env_pool() -> None:

    class Mesh:
        world_size = 2

    names = run(POOL, EnvTool=EnvTool, mesh=Mesh())
    with names["pool"] as pool:
        assert pool.num_workers == 2
        assert len(names["envs"]) == 64
        (tool,) = names["env_tools"]
        observations = [result.observation for result in pool.reset_batch(range(64))]
        assert ["blackjack: 12" in observation for observation in observations] == [True] * 64
        assert "blackjack: 21" in tool("env_action", {"action": "hit"})
        assert (tool.done, tool.episode_reward) == (True, 1.0)
