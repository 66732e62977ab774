"""The server side of the word game."""

from __future__ import annotations

from word_game_env.server.word_game_environment import WordGameEnvironment

__all__ = ["WordGameEnvironment"]
