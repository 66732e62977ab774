"""An environment that needs no `openenv`, whose steps wait until `abort` is called."""

from __future__ import annotations

import threading
from typing import Any

from openenv_server.concurrent import concurrent_app
from openenv_server.openenv_types import Action, Environment, Observation, State


class WaitAction(Action):
    how: str = "wait"


class WaitEnvironment(Environment[WaitAction, Observation, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._ended = threading.Event()

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def step(self, action: WaitAction) -> Observation:
        match action.how:
            case "exit":
                raise SystemExit(3)
            case "nan":
                return Observation(reward=float("nan"))
            case "unwritable":
                return Observation(metadata={"it": "\ud800"})
            case _:
                self._ended.wait()
                return Observation()

    def abort(self) -> None:
        self._ended.set()

    @property
    def state(self) -> State:
        return State()


def make() -> Any:
    return WaitEnvironment()


app = concurrent_app(
    make, WaitAction, Observation, State, name="waiting", max_concurrent_envs=1, max_queue=0
)
