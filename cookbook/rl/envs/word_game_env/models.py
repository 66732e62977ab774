"""What goes over the wire: the action, the observation and the state of the word game."""

from __future__ import annotations

from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field

__all__ = ["GuessFeedback", "WordGameAction", "WordGameObservation", "WordGameState"]


class WordGameAction(Action):
    """One guess."""

    guess: str = Field(description="A word of exactly the asked length, letters a to z.")


class GuessFeedback(BaseModel):
    """One guess that was played, and what it revealed."""

    guess: str
    marks: str = Field(
        description="One sign per letter: = right place, ~ elsewhere in the word, . absent."
    )


class WordGameObservation(Observation):
    """What the player sees; `text` says all of it in words."""

    text: str = ""
    word_length: int = 0
    attempts_left: int = 0
    history: list[GuessFeedback] = Field(default_factory=list[GuessFeedback])
    won: bool = False


class WordGameState(State):
    """Where the episode stands. The secret word is only here once the game is over."""

    seed: int | None = None
    difficulty: str = ""
    word_length: int = 0
    max_attempts: int = 0
    attempts_left: int = 0
    total_reward: float = 0.0
    done: bool = False
    won: bool = False
    secret: str | None = None
