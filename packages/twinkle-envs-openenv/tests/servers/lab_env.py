# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
"""A small environment whose every step does what the action says, good or bad."""

from __future__ import annotations

import time
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import ConfigDict, Field, field_validator


class LabAction(Action):
    """Tell the lab what to do."""

    command: str
    value: str = ""
    number: float = 0.0

    @field_validator("value")
    @classmethod
    def _no_bombs(cls, value: str) -> str:
        if value == "bomb":
            raise ValueError("no bombs in the lab")
        return value


class LabObservation(Observation):
    text: str = ""


class Snapshot:
    """Of no JSON Schema."""


class SnapshotObservation(LabObservation):
    """Makes `GET /schema` fail, as the observation of OpenEnv's websearch_env does."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    snapshot: Snapshot | None = None


class LabState(State):
    seed: int | None = None
    values: list[str] = Field(default_factory=list[str])


class LabEnvironment(Environment[LabAction, LabObservation, LabState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = LabState()

    def reset(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        greeting: str = "welcome",
    ) -> LabObservation:
        if greeting == "explode":
            raise RuntimeError("the lab exploded at reset")
        if greeting == "unusable":
            return LabObservation(
                done=True, metadata={"status": "error", "error": "LAB_KEY is not set"}
            )
        self._state = LabState(episode_id=episode_id or "made-up", seed=seed)
        return LabObservation(text=f"{greeting} seed={seed}", reward=0.0)

    def step(self, action: LabAction, timeout_s: float | None = None, **_: Any) -> LabObservation:
        self._state.step_count += 1
        self._state.values.append(action.value)
        match action.command:
            case "say":
                return LabObservation(
                    text=action.value, reward=action.number, metadata={"secret": "hidden"}
                )
            case "sleep":
                time.sleep(action.number)
                return LabObservation(text=f"slept for {action.value}", reward=0.0)
            case "raise":
                raise RuntimeError(action.value)
            case "exit":
                raise SystemExit(3)
            case "unscored":
                return LabObservation(text="unscored", reward=None)
            case "repeat":
                return LabObservation(text=action.value * int(action.number), reward=0.0)
            case "length":
                return LabObservation(text=str(len(action.value)), reward=0.0)
            case "end":
                return LabObservation(text="over", reward=1.0, done=True)
            case _:
                raise ValueError(f"unknown command {action.command!r}")

    @property
    def state(self) -> LabState:
        return self._state


class ForgetfulEnvironment(LabEnvironment):
    """Takes nothing at reset, as `coding_env` does."""

    def reset(self) -> LabObservation:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset()


class CodeAction(Action):
    code: str


class CodeObservation(Observation):
    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class CodeEnvironment(Environment[CodeAction, CodeObservation, State]):
    """Evaluates an expression, or says what is wrong with it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self) -> CodeObservation:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self._state = State(episode_id="code")
        return CodeObservation(reward=0.0)

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        source = action.code.removeprefix("print(").removesuffix(")")
        try:
            value = eval(source, {"__builtins__": {}})
        except Exception as error:
            return CodeObservation(
                stderr=f"{type(error).__name__}: {error}\n", exit_code=1, reward=-1.0
            )
        return CodeObservation(stdout=f"{value}\n", reward=0.1)

    @property
    def state(self) -> State:
        return self._state


class BrokenEnvironment(LabEnvironment):
    def __init__(self) -> None:
        raise RuntimeError("cannot be built")
