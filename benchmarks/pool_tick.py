"""An environment that does nothing but wait: what the pools of `env_pool.py` hold."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass
class Observation:
    """One answer, in the form that both adapters read."""

    observation: str = "You hold 10 and 7, the dealer shows 6."
    reward: float = 0.0
    done: bool = False
    metadata: dict[str, Any] | None = None


class Tick:
    """Answers after `delay_s` seconds."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def reset(self) -> Observation:
        return Observation()

    def step(self, action: Any) -> Observation:
        if self._delay_s:
            time.sleep(self._delay_s)
        return Observation()

    def close(self) -> None:
        return None


def make_env(delay_s: float = 0.0, instant: bool = False) -> Any:
    """Wrap it as a plain `Env`, without the nine seconds of CPU that `openenv` takes to import."""
    from twinkle_agentic.envs.base import Env, StepResult

    class TickEnv(Env):
        def __init__(self) -> None:
            self._tick = Tick(delay_s)
            self.instant = instant

        def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
            answer = self._tick.step(arguments)
            return StepResult.scored(answer.observation, answer.reward, done=answer.done)

    return TickEnv()
