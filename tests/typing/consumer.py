"""What a user's type checker sees of the installed wheels: real types, also behind lazy names."""

from __future__ import annotations

from typing import assert_type

from twinkle_agentic.envs import AgentEnv, Env, EnvTool, OpenEnv, OpenEnvClient, StepResult
from twinkle_agentic.envs.base import Env as DeepEnv
from twinkle_agentic.envs.openenv import EnvPool
from twinkle_agentic.tools import FunctionTool, ToolManager


def client() -> OpenEnvClient:
    return OpenEnvClient("coding_env", base_url="http://localhost:8000")


def play(env: Env) -> str:
    result = env.step("run_python", {"code": "print(1)"})
    assert_type(result, StepResult)
    assert_type(result.reward, float)
    return result.observation


def tools(env: DeepEnv) -> ToolManager:
    manager = ToolManager(EnvTool.from_env(env))
    manager.register(FunctionTool(play))
    return manager


def adapters(pool: EnvPool) -> list[Env]:
    return [*pool.get_adapters(2), OpenEnv(env_name="word_game_env"), AgentEnv("base"), client()]
