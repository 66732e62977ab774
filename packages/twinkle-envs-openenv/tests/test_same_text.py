# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The same texts and tools in process, by a client class, and by plain dicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.base import Env
from twinkle_agentic.envs.openenv import OpenEnv, OpenEnvClient

pytestmark = pytest.mark.timeout(180)  # the first test waits for the servers to import openenv

GUESS = ("env_action", {"guess": "crane"})
KINDS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "word_game": (
        "word_game_env.server.word_game_environment:WordGameEnvironment",
        "word_game_env.client:WordGameEnv",
        [GUESS, ("env_action", {"guess": "no"}), ("env_action", {"word": "crane"}), GUESS],
    ),
    "board": (
        "board_env:BoardEnvironment",
        "board_env:BoardEnv",
        [
            ("env_action", {"place": 1}),
            ("env_action", {"place": 1}),
            ("env_action", {"place": 7}),
            ("env_action", {"column": 0}),
            ("env_action", {"place": 0}),
            ("env_action", {"place": 2}),
            ("env_action", {"place": 2}),
        ],
    ),
    "code": (
        "lab_env:CodeEnvironment",
        "board_env:CodeEnv",
        [
            ("run_python", {"code": "print(6 * 7)"}),
            ("run_python", {"code": "1 / 0"}),
            ("run_python", {"script": "1"}),
        ],
    ),
    "tools": (
        "tool_env:ToolEnvironment",
        "board_env:ToolEnv",
        [
            ("repeat", {"message": "a", "times": 2}),
            ("repeat", {"text": "a"}),
            ("divide", {"a": 1, "b": 0}),
            ("multiply", {"a": 1}),
        ],
    ),
}


@pytest.fixture(params=KINDS)
def ways(
    request: pytest.FixtureRequest,
    openenv_ports: dict[str, int],
    word_game_package: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[dict[str, Env]]:
    kind: str = request.param
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "servers"))
    environment, client, _ = KINDS[kind]
    settings: dict[str, Any] = {"reset_kwargs": {"seed": 3}}
    settings["about"] = f"Environment: {kind}"
    url = f"http://127.0.0.1:{openenv_ports[kind]}"
    made: dict[str, Env] = {
        "embedded": OpenEnv(env_cls=environment, tools="auto", strict_reset=False, **settings),
        "client class": OpenEnvClient(env_cls=client, base_url=url, **settings),
        "plain dicts": OpenEnvClient("no_such_package", base_url=url, **settings),
    }
    yield made
    for env in made.values():
        env.close()


def test_texts_and_tools_are_the_same(ways: dict[str, Env], request: pytest.FixtureRequest) -> None:
    moves = KINDS[request.node.callspec.params["ways"]][2]
    seen: dict[str, list[Any]] = {}
    for name, env in ways.items():
        first = env.reset()
        said: list[Any] = [env.tools(), (first.observation, first.reward, first.done)]
        for tool, arguments in moves:
            step = env.step(tool, arguments)
            said.append((step.observation, step.reward, step.done, bool(step.error)))
        seen[name] = said
    assert seen["client class"] == seen["plain dicts"]
    assert seen["embedded"] == seen["plain dicts"]


@pytest.mark.parametrize("ways", ["board"], indirect=True)
def test_move_that_is_not_allowed_is_told_and_what_the_environment_says_of_it_stands(
    ways: dict[str, Env],
) -> None:
    for name, env in ways.items():
        env.reset()
        env.step("env_action", {"place": 1})
        ruled = env.step("env_action", {"place": 1})
        assert "[place=1 was not among legal_actions]" in ruled.observation, name
        assert (ruled.reward, ruled.error) == (-1.0, None)
        raised = env.step("env_action", {"place": 7})
        assert (raised.error is not None, raised.done) == (True, False)
        assert "[place=7 was not among legal_actions]" in raised.observation
        assert "the environment raised an error that says only 7" in raised.observation
        legal = env.step("env_action", {"place": 0})
        assert (legal.reward, "not among" in legal.observation) == (1.0, False)
