"""A word-guessing game as an OpenEnv environment: several turns, shaped reward, seeded."""

from __future__ import annotations

from word_game_env.client import WordGameEnv
from word_game_env.models import GuessFeedback, WordGameAction, WordGameObservation, WordGameState

__all__ = [
    "GuessFeedback",
    "WordGameAction",
    "WordGameEnv",
    "WordGameObservation",
    "WordGameState",
]
