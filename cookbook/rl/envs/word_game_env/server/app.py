"""The word game over HTTP and WebSocket.

Run it with `uvicorn word_game_env.server.app:app --port 8000 --workers 2`. `MAX_CONCURRENT_ENVS`
(default 64) is the number of sessions *per worker process*.
"""

from __future__ import annotations

import os

from fastapi import FastAPI
from openenv.core.env_server.http_server import (
    create_app,  # pyright: ignore[reportUnknownVariableType]  # OpenEnv leaves its generics open
)

from word_game_env.models import WordGameAction, WordGameObservation, WordGameState
from word_game_env.server.word_game_environment import WordGameEnvironment

__all__ = ["app", "main"]


def _max_concurrent_envs() -> int:
    found = os.environ.get("MAX_CONCURRENT_ENVS", "64")
    if not found.isdecimal() or int(found) < 1:
        raise SystemExit(
            f"MAX_CONCURRENT_ENVS is {found!r}: set it to a whole number of at least 1"
        )
    return int(found)


app: FastAPI = create_app(
    WordGameEnvironment,
    WordGameAction,
    WordGameObservation,
    env_name="word_game_env",
    max_concurrent_envs=_max_concurrent_envs(),
    state_cls=WordGameState,
)


def main() -> None:
    """Serve on 127.0.0.1, port `PORT` (default 8000)."""
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))


if __name__ == "__main__":
    main()
