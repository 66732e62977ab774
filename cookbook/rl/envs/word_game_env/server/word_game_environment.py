"""The rules of the word game.

A secret word is drawn from the seed. Each guess reveals which letters are right; the episode ends
when the word is found or the attempts are used up. Same seed and settings, same secret.
"""

from __future__ import annotations

import random
import secrets
import string
from collections import Counter
from typing import Any
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment

from word_game_env.models import GuessFeedback, WordGameAction, WordGameObservation, WordGameState
from word_game_env.server.words import SECRETS

__all__ = ["WordGameEnvironment", "mark_guess"]

_ATTEMPTS = {"easy": 8, "normal": 6, "hard": 4}

_WIN_REWARD = 1.0
_NEW_PLACE_REWARD = 0.2  # for a whole word of newly placed letters, in proportion
_NEW_LETTER_REWARD = 0.1  # for a whole word of newly found letters, in proportion
_BAD_GUESS_REWARD = -0.1


class WordGameEnvironment(Environment[WordGameAction, WordGameObservation, WordGameState]):
    """Guess a word; every guess costs an attempt, also one that breaks the rules.

    The reward of a step is 0.2 times the share of places found for the first time plus 0.1 times
    the share of letters found for the first time; 1.0 more for the word itself; -0.1 instead for
    a guess that breaks the rules or repeats an earlier one. An episode is worth -0.8 to 1.3.

    Example:
        >>> env = WordGameEnvironment()
        >>> env.reset(seed=7, word_length=4, difficulty="easy").attempts_left
        8
    """

    SUPPORTS_CONCURRENT_SESSIONS = True  # each session has its own object

    def __init__(self) -> None:
        super().__init__()
        self._state = WordGameState()
        self._secret = ""
        self._history: list[GuessFeedback] = []
        self._places: set[int] = set()
        self._letters: Counter[str] = Counter()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        word_length: int = 5,
        difficulty: str = "normal",
        **unknown: Any,
    ) -> WordGameObservation:
        """Start a new game.

        Args:
            seed: Picks the secret; without one a random seed is drawn, which `state.seed` tells.
            episode_id: Name of the episode; made up when it is not given.
            word_length: 4, 5 or 6 letters.
            difficulty: `easy` (8 attempts), `normal` (6) or `hard` (4).
            unknown: Refused, so that a misspelt setting does not go unnoticed.

        Raises:
            ValueError: A setting is unknown or out of range.
        """
        if unknown:
            raise ValueError(
                f"the word game has no setting {', '.join(sorted(unknown))!r}: "
                "it takes seed, episode_id, word_length and difficulty"
            )
        if word_length not in SECRETS:
            raise ValueError(f"word_length is {word_length!r}: choose one of {sorted(SECRETS)}")
        if difficulty not in _ATTEMPTS:
            raise ValueError(f"difficulty is {difficulty!r}: choose one of {list(_ATTEMPTS)}")
        if seed is None:
            seed = secrets.randbits(31)
        self._secret = random.Random(seed).choice(SECRETS[word_length])
        self._history = []
        self._places = set()
        self._letters = Counter()
        self._state = WordGameState(
            episode_id=episode_id or str(uuid4()),
            seed=seed,
            difficulty=difficulty,
            word_length=word_length,
            max_attempts=_ATTEMPTS[difficulty],
            attempts_left=_ATTEMPTS[difficulty],
        )
        return self._observe(
            f"Guess the secret word of {word_length} letters. You have "
            f"{self._state.attempts_left} attempts. After each guess you see one sign per letter: "
            "= right place, ~ elsewhere in the word, . not in the word.",
            reward=0.0,
        )

    def step(
        self, action: WordGameAction, timeout_s: float | None = None, **_: Any
    ) -> WordGameObservation:
        """Play one guess.

        Raises:
            RuntimeError: No game was started, or it is over.
        """
        state = self._state
        if not self._secret:
            raise RuntimeError("no game has been started: call reset before step")
        if state.done:
            raise RuntimeError("the game is over: call reset to start another")
        guess = action.guess.strip().lower()
        state.step_count += 1
        state.attempts_left -= 1
        complaint = self._complaint(guess)
        if complaint:
            said, reward = complaint, _BAD_GUESS_REWARD
        else:
            said, reward = self._play(guess)
        state.done = state.won or state.attempts_left == 0
        state.total_reward += reward
        if state.done:
            state.secret = self._secret
            said += "" if state.won else f" No attempts left. The word was {self._secret}."
        return self._observe(said, reward=reward)

    @property
    def state(self) -> WordGameState:
        """Where the episode stands."""
        return self._state

    def _complaint(self, guess: str) -> str:
        if len(guess) != len(self._secret):
            return f"{guess!r} is {len(guess)} long, not {len(self._secret)} letters."
        if not set(guess) <= set(string.ascii_lowercase):
            return f"{guess!r} has signs other than the letters a to z."
        if any(guess == played.guess for played in self._history):
            return f"{guess!r} has been guessed before."
        return ""

    def _play(self, guess: str) -> tuple[str, float]:
        marks = mark_guess(self._secret, guess)
        self._history.append(GuessFeedback(guess=guess, marks=marks))
        places = {place for place, mark in enumerate(marks) if mark == "="}
        letters = Counter(letter for letter, mark in zip(guess, marks, strict=True) if mark != ".")
        new_places = len(places - self._places)
        new_letters = (letters - self._letters).total()
        self._places |= places
        self._letters |= letters
        length = len(self._secret)
        reward = (_NEW_PLACE_REWARD * new_places + _NEW_LETTER_REWARD * new_letters) / length
        if guess == self._secret:
            self._state.won = True
            return f"Yes, the word is {guess}.", reward + _WIN_REWARD
        return f"{guess!r} is not the word.", reward

    def _observe(self, said: str, *, reward: float) -> WordGameObservation:
        state = self._state
        lines = [said, *(f"{played.guess}  {played.marks}" for played in self._history)]
        if not state.done and state.step_count:
            lines.append(f"Attempts left: {state.attempts_left}.")
        return WordGameObservation(
            text="\n".join(lines),
            word_length=state.word_length,
            attempts_left=state.attempts_left,
            history=list(self._history),
            won=state.won,
            reward=reward,
            done=state.done,
            metadata={"episode_id": state.episode_id, "step": state.step_count},
        )


def mark_guess(secret: str, guess: str) -> str:
    """Compare a guess with the secret, letter by letter.

    Returns:
        One sign per letter: `=` right place, `~` elsewhere, `.` absent. A letter is marked at most
        as often as the secret holds it, places first, then from left to right.
    """
    left = Counter(s for s, g in zip(secret, guess, strict=True) if s != g)
    marks: list[str] = []
    for s, g in zip(secret, guess, strict=True):
        if s == g:
            marks.append("=")
        elif left[g] > 0:
            left[g] -= 1
            marks.append("~")
        else:
            marks.append(".")
    return "".join(marks)
