# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""Client classes of installed packages that do not do what OpenEnv's own would."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.openenv import OpenEnvClient

pytestmark = pytest.mark.timeout(180)  # the first test waits for the servers to import openenv

Install = Callable[[str, str], None]

COMMON = """
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import Action, Observation

class LabAction(Action):
    command: str
    value: str = ""
    number: float = 0.0

class LabObservation(Observation):
    text: str = ""
"""

# Looks for reward and done where a server does not put them, as a published chess client does.
FORGETFUL = (
    COMMON
    + """
class LabEnv(EnvClient[LabAction, LabObservation, dict]):
    def _step_payload(self, action): return action.model_dump()
    def _parse_result(self, payload):
        fields = payload["observation"]
        seen = LabObservation(text=fields["text"], reward=fields.get("reward", 0.0))
        return StepResult(observation=seen, reward=seen.reward, done=seen.done)
    def _parse_state(self, payload): return payload
"""
)

# Has a constructor of its own, as a published medical client does.
OWN_CONSTRUCTOR = (
    COMMON
    + """
class LabEnv(EnvClient[LabAction, LabObservation, dict]):
    def __init__(self, base_url: str, timeout: float = 60.0):
        super().__init__(base_url=base_url, message_timeout_s=timeout)
    def _step_payload(self, action): return action.model_dump()
    def _parse_result(self, payload):
        seen = LabObservation(text=payload["observation"]["text"])
        return StepResult(observation=seen, reward=payload["reward"], done=payload["done"])
    def _parse_state(self, payload): return payload
"""
)

UNMAKEABLE = OWN_CONSTRUCTOR.replace(
    "super().__init__(base_url=base_url, message_timeout_s=timeout)",
    'raise RuntimeError("no display")',
)


# Has a field without a JSON Schema, as the client of OpenEnv's chat_env has.
UNDESCRIBED = (
    FORGETFUL.replace("dump()", "dump(exclude={'tensor'})")
    + """
class Tensor:
    pass

class TensorAction(LabAction):
    model_config = {"arbitrary_types_allowed": True}
    tensor: Tensor | None = None
"""
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed: it comes with the embedded extra")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))

    return write


def lab(ports: dict[str, int], **settings: Any) -> OpenEnvClient:
    return OpenEnvClient(base_url=f"http://127.0.0.1:{ports['lab']}", **settings)


def test_reward_and_done_are_the_servers_whatever_the_client_class_makes_of_them(
    openenv_ports: dict[str, int], install: Install
) -> None:
    install("forgetful_client_env", FORGETFUL)
    with lab(openenv_ports, env_name="forgetful_client_env") as env:
        assert env.reset().info["client_class"] == "forgetful_client_env:LabEnv"
        result = env.step("env_action", {"command": "say", "value": "a", "number": 0.5})
        assert (result.observation, result.reward, env.episode_reward) == ("a", 0.5, 0.5)
        unscored = env.step("env_action", {"command": "unscored"})
        assert unscored.info["reward_missing"] is True
        assert env.execute({"command": "say", "number": 2.0}).reward == 2.0
        end = env.step("env_action", {"command": "end"})
        assert (end.reward, end.done, env.last_result.done) == (1.0, True, True)
        assert env.episode_reward == 1.5


def test_client_class_with_a_constructor_of_its_own_is_used(
    openenv_ports: dict[str, int], install: Install
) -> None:
    install("own_constructor_env", OWN_CONSTRUCTOR)
    with lab(openenv_ports, env_name="own_constructor_env") as env:
        result = env.reset()
        assert result.info["client_class"] == "own_constructor_env:LabEnv"
        assert "client_note" not in result.info
    name = "own_constructor_env"
    heeded = {"headers": {"x-token": "t"}}  # by our own connection
    with lab(openenv_ports, env_name=name, client_kwargs=heeded) as env:
        assert env.reset().info["client_class"] == "own_constructor_env:LabEnv"
    with (
        lab(openenv_ports, env_name=name, client_kwargs={"rounds": 3}) as env,
        pytest.raises(ValueError, match=r"client_kwargs.*rounds"),
    ):
        env.reset()


def test_action_class_without_a_schema_is_not_offered_as_python(
    openenv_ports: dict[str, int], install: Install
) -> None:
    install("undescribed_env", UNDESCRIBED)
    names = {"env_cls": "undescribed_env:LabEnv", "action_cls": "undescribed_env:TensorAction"}
    with lab(openenv_ports, **names) as env:
        assert "TensorAction" in env.reset().info["schema_error"]
        (tool,) = env.tools()
        assert tool["function"]["name"] == "env_action"
        assert env.step("env_action", {"command": "say", "value": "a"}).observation == "a"


def test_client_class_that_cannot_be_made_is_not_used_unless_asked_for(
    openenv_ports: dict[str, int], install: Install
) -> None:
    install("unmakeable_env", UNMAKEABLE)
    with lab(openenv_ports, env_name="unmakeable_env") as env:
        result = env.reset()
        assert result.info["client_class"] is None
        assert "no display" in result.info["client_note"]
        assert env.step("env_action", {"command": "say", "value": "x"}).observation == "x"
    with (
        lab(openenv_ports, env_cls="unmakeable_env:LabEnv") as env,
        pytest.raises(ValueError, match="no display"),
    ):
        env.reset()
