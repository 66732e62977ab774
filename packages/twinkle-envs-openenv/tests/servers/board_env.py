# The data of the tests is free-form JSON.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""A board game, and client classes of it and of the other environments here."""

from __future__ import annotations

from typing import Any

from lab_env import CodeAction, CodeObservation
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.mcp_client import MCPToolClient
from pydantic import Field


class BoardAction(Action):
    """Take a field of the row.

    Attributes:
        place: Which one, from the left; 0 is the first.
        pace: How fast.
    """

    place: int
    pace: str = "slow"


class BoardObservation(Observation):
    """The row as it is.

    Attributes:
        board: One row; 1 is taken, 0 is free.
        legal_actions: Free places.
    """

    board: list[list[int]] = Field(default_factory=list[list[int]])
    legal_actions: list[int] = Field(default_factory=list[int])


class BoardEnvironment(Environment[BoardAction, BoardObservation, State]):
    """Rules on a place that is taken by a penalty, and raises for one that is none."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._row = [0, 0, 0]

    def reset(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        self, seed: int | None = None
    ) -> BoardObservation:
        self._row = [0, 0, 0]
        return self._seen(0.0)

    def step(
        self, action: BoardAction, timeout_s: float | None = None, **_: Any
    ) -> BoardObservation:
        taken = {0: self._row[0], 1: self._row[1], 2: self._row[2]}[action.place]
        self._row[action.place] = 1
        return self._seen(-1.0 if taken else 1.0)

    def _seen(self, reward: float) -> BoardObservation:
        free = [place for place, taken in enumerate(self._row) if not taken]
        return BoardObservation(
            board=[list(self._row), [0, 0, 0]],
            legal_actions=free,
            reward=reward,
            done=not free,
            metadata={"next_player": 1 + len(free) % 2},
        )

    @property
    def state(self) -> State:
        return State()


class BoardEnv(EnvClient[BoardAction, BoardObservation, State]):
    """Drops the metadata, as clients of many packages do."""

    def _step_payload(self, action: BoardAction) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[BoardObservation]:
        return StepResult(observation=BoardObservation(**_without_metadata(payload)))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class CodeEnv(EnvClient[CodeAction, CodeObservation, State]):
    def _step_payload(self, action: CodeAction) -> dict[str, Any]:
        return {"code": action.code}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CodeObservation]:
        return StepResult(observation=CodeObservation(**_without_metadata(payload)))

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


class ToolEnv(MCPToolClient):
    pass


def _without_metadata(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload["observation"].items() if name != "metadata"}
