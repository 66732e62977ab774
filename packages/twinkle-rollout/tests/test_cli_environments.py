"""What `--env` may name, and what is said where it names nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from twinkle_agentic.rollout.cli.environments import choose_env
from twinkle_agentic.rollout.cli.refusal import RefusedError


def refused(spec: str) -> str:
    with pytest.raises(RefusedError) as refusal:
        choose_env(spec)
    return str(refusal.value)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with 40 callables, one of them a letter away from `make_gaem`."""
    names = [f"other_{number}" for number in range(39)]
    lines = [f"def {name}(trajectory): ..." for name in ("make_game", *names)]
    (tmp_path / "forty_callables.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "forty_callables"


def test_of_many_callables_the_closest_are_named(module: str) -> None:
    assert refused(f"{module}:make_gaem").endswith("(it has 40: make_game)")
    few = "make_game, other_0, other_1, other_2, other_3, other_4"
    assert refused(f"{module}:zzz").endswith(f"(it has 40: {few})")


def test_an_attribute_that_cannot_be_called_is_refused_in_a_short_line() -> None:
    said = refused("os:sep")
    assert "os has no callable 'sep'" in said
    assert len(said) < 200


def test_what_a_module_imports_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_imports.py").write_text(
        "from twinkle_agentic.envs.base import Env, StepResult\n"
        "class Game(Env):\n"
        "    def step(self, tool_name, arguments): return StepResult()\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert refused("with_imports:game").endswith("(it has 1: Game)")


def test_a_module_without_a_name_is_told_how_it_is_named() -> None:
    assert refused("with_imports.Game").endswith("an env of your own is named module:name")
