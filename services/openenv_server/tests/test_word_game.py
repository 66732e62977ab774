"""The word game of the cookbook: its rules, and its server under the stock client."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "cookbook" / "rl" / "envs"


@pytest.fixture(scope="module")
def game() -> Iterator[Any]:
    """Import the package from its parent folder."""
    sys.path.insert(0, str(FOLDER))
    package: Any = importlib.import_module("word_game_env")
    environment: Any = importlib.import_module("word_game_env.server.word_game_environment")
    words: Any = importlib.import_module("word_game_env.server.words")
    yield SimpleNamespace(
        WordGameAction=package.WordGameAction,
        WordGameEnv=package.WordGameEnv,
        Environment=environment.WordGameEnvironment,
        mark_guess=environment.mark_guess,
        secrets=words.SECRETS,
    )
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize(
    ("secret", "guess", "marks"),
    [
        ("apple", "apple", "====="),
        ("apple", "plate", "~~~.="),
        ("river", "error", "~~..="),
        ("storm", "table", "~...."),
        ("otter", "tooth", "~~.~."),
    ],
)
def test_marks(game: Any, secret: str, guess: str, marks: str) -> None:
    assert game.mark_guess(secret, guess) == marks


def _play(game: Any, guesses: list[str], **reset: Any) -> tuple[Any, list[Any]]:
    env = game.Environment()
    env.reset(**reset)
    return env, [env.step(game.WordGameAction(guess=guess)) for guess in guesses]


def test_the_same_seed_gives_the_same_game(game: Any) -> None:
    runs: list[Any] = []
    for _ in range(2):
        env, steps = _play(game, ["acorn", "tiger", "melon", "quilt", "flame", "brush"], seed=3)
        runs.append(([s.text for s in steps], [s.reward for s in steps], env.state.secret))
    assert runs[0] == runs[1]


def test_seeds_differ(game: Any) -> None:
    secrets: set[str] = set()
    for seed in range(20):
        env, _ = _play(game, ["a"] * 6, seed=seed)
        secrets.add(env.state.secret)
    assert len(secrets) > 5


def test_finding_the_word_wins_and_pays_most(game: Any) -> None:
    env, _ = _play(game, ["a"] * 8, seed=1, difficulty="easy")
    secret = env.state.secret
    _, (won,) = _play(game, [secret], seed=1, difficulty="easy")
    assert (won.done, won.won) == (True, True)
    assert won.reward == pytest.approx(1.3)


def test_shaping_pays_for_what_is_new_only(game: Any) -> None:
    env, _ = _play(game, ["a"] * 6, seed=1)
    secret = env.state.secret
    half = secret[:2] + "q" * (len(secret) - 2)
    more = secret[:2] + "j" * (len(secret) - 2)
    _, (first, second) = _play(game, [half, more], seed=1)
    assert first.reward == pytest.approx(0.3 * 2 / 5)
    assert second.reward == 0.0


def test_bad_guesses_cost_an_attempt_and_say_why(game: Any) -> None:
    _, steps = _play(game, ["acorn", "acorn", "abc", "ab3de", "ABOVE", " tiger "], seed=5)
    assert [s.reward == -0.1 for s in steps[:4]] == [False, True, True, True]
    assert "guessed before" in steps[1].text
    assert "5 letters" in steps[2].text
    assert "letters a to z" in steps[3].text
    assert [s.attempts_left for s in steps] == [5, 4, 3, 2, 1, 0]
    assert steps[-1].done
    assert [guess.guess for guess in steps[-1].history] == ["acorn", "above", "tiger"]


def test_the_secret_is_told_after_the_end_only(game: Any) -> None:
    env = game.Environment()
    env.reset(seed=1, episode_id="mine", word_length=4, difficulty="hard")
    for left in (3, 2, 1, 0):
        assert env.state.secret is None
        observation = env.step(game.WordGameAction(guess="?"))
        assert env.state.attempts_left == left
    assert env.state.episode_id == "mine"
    assert f"The word was {env.state.secret}." in observation.text
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(game.WordGameAction(guess="bark"))


def test_stepping_before_reset_is_an_error(game: Any) -> None:
    with pytest.raises(RuntimeError, match="call reset before step"):
        game.Environment().step(game.WordGameAction(guess="bark"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"word_length": 9}, r"word_length is 9: choose one of \[4, 5, 6\]"),
        ({"difficulty": "mad"}, "difficulty is 'mad'"),
        ({"letters": 4}, "no setting 'letters': it takes seed"),
    ],
)
def test_bad_settings_are_refused(game: Any, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        game.Environment().reset(**setting)


def test_the_words_fit_their_length(game: Any) -> None:
    for length, words in game.secrets.items():
        assert {len(word) for word in words} == {length}
        assert len(set(words)) == len(words) > 50


def test_a_served_game_is_played_over_its_client(game: Any, serve: Any) -> None:
    uvicorn = str(Path(sys.executable).with_name("uvicorn"))
    env = {"PYTHONPATH": str(FOLDER), "MAX_CONCURRENT_ENVS": "2"}
    command = [uvicorn, "word_game_env.server.app:app", "--port", "0"]
    with serve(command, env=env) as server:
        clients = [game.WordGameEnv(base_url=server.url).sync() for _ in range(2)]
        try:
            for client in clients:
                first = client.reset(seed=4, word_length=6, difficulty="easy", episode_id="e")
                assert (first.observation.word_length, first.observation.attempts_left) == (6, 8)
            result = clients[0].step(game.WordGameAction(guess="planet"))
            assert result.observation.history[0].guess == "planet"
            assert result.observation.reward == result.reward
            assert not result.done
            assert clients[1].state().step_count == 0  # the other game has not moved
            assert clients[0].state().seed == 4
        finally:
            for client in clients:
                client.close()
