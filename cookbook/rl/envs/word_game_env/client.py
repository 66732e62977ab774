"""Client of a word game server."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from word_game_env.models import WordGameAction, WordGameObservation, WordGameState

__all__ = ["WordGameEnv"]


class WordGameEnv(EnvClient[WordGameAction, WordGameObservation, WordGameState]):
    """One session on a word game server.

    Example:
        >>> with WordGameEnv(base_url="http://127.0.0.1:8000").sync() as env:
        ...     result = env.reset(seed=7, word_length=5)
        ...     result = env.step(WordGameAction(guess="crane"))
        ...     print(result.observation.text, result.reward)
    """

    def _step_payload(self, action: WordGameAction) -> dict[str, Any]:
        return {"guess": action.guess}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[WordGameObservation]:
        # The server moves reward and done out of the observation; put them back for typed users.
        reward, done = payload.get("reward"), bool(payload.get("done", False))
        observation = WordGameObservation.model_validate(
            {**payload["observation"], "reward": reward, "done": done}
        )
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> WordGameState:
        return WordGameState.model_validate(payload)
