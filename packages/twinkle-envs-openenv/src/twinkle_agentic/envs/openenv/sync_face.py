"""The synchronous face of a session, for code that knows OpenEnv's own clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_agentic.envs.openenv.client import OpenEnvClient

__all__ = ["SessionClient"]


class SessionClient:
    """`reset`, `step`, `state` and `close` of one session, with the server's answers as they are.

    It shares the session of its env: same episode, same queue. None of it touches `episode_reward`
    but `reset`.
    """

    def __init__(self, env: OpenEnvClient) -> None:
        self._env = env

    def reset(self, **kwargs: Any) -> Any:
        """Start a new episode with these arguments alone; raises as `OpenEnvClient.reset`."""
        return self._env.start_episode(kwargs)

    def step(self, action: Any) -> Any:
        """Send an action; raises as `OpenEnvClient.execute`."""
        return self._env.execute(action)

    def state(self) -> Any:
        """Return the environment's state; raises as `OpenEnvClient.execute`."""
        return self._env.state()

    def close(self) -> None:
        """End the session."""
        self._env.close()
