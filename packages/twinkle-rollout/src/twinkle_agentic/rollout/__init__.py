"""Multi-turn rollouts: from a model and environments to scored trajectories.

The names below are imported on first use, so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_agentic.protocol.retry import RetryPolicy
    from twinkle_agentic.protocol.sampling import SamplingParams
    from twinkle_agentic.rollout._token_bridge import extend_with_bridge
    from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
    from twinkle_agentic.rollout.base import Rollout
    from twinkle_agentic.rollout.export import json_line, training_trace, write_jsonl
    from twinkle_agentic.rollout.failures import (
        Coverage,
        FailurePolicy,
        RolloutFailedError,
        RolloutResult,
    )
    from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
    from twinkle_agentic.rollout.stream import AsyncTrajectoryStream, TrajectoryStream
    from twinkle_agentic.rollout.types import (
        FinishedTrajectory,
        StopReason,
        TokenTrajectory,
        TokenTurn,
    )

__all__ = [
    "APIMultiTurnRollout",
    "AsyncTrajectoryStream",
    "Coverage",
    "FailurePolicy",
    "FinishedTrajectory",
    "MultiTurnRollout",
    "RetryPolicy",
    "Rollout",
    "RolloutFailedError",
    "RolloutResult",
    "SamplingParams",
    "StopReason",
    "TokenTrajectory",
    "TokenTurn",
    "TrajectoryStream",
    "extend_with_bridge",
    "json_line",
    "training_trace",
    "write_jsonl",
]

_MODULES = {
    "APIMultiTurnRollout": "twinkle_agentic.rollout.api_multi_turn",
    "AsyncTrajectoryStream": "twinkle_agentic.rollout.stream",
    "Coverage": "twinkle_agentic.rollout.failures",
    "FailurePolicy": "twinkle_agentic.rollout.failures",
    "FinishedTrajectory": "twinkle_agentic.rollout.types",
    "MultiTurnRollout": "twinkle_agentic.rollout.multi_turn",
    "RetryPolicy": "twinkle_agentic.protocol.retry",
    "Rollout": "twinkle_agentic.rollout.base",
    "RolloutFailedError": "twinkle_agentic.rollout.failures",
    "RolloutResult": "twinkle_agentic.rollout.failures",
    "SamplingParams": "twinkle_agentic.protocol.sampling",
    "StopReason": "twinkle_agentic.rollout.types",
    "TokenTrajectory": "twinkle_agentic.rollout.types",
    "TokenTurn": "twinkle_agentic.rollout.types",
    "TrajectoryStream": "twinkle_agentic.rollout.stream",
    "extend_with_bridge": "twinkle_agentic.rollout._token_bridge",
    "json_line": "twinkle_agentic.rollout.export",
    "training_trace": "twinkle_agentic.rollout.export",
    "write_jsonl": "twinkle_agentic.rollout.export",
}
# Where twinkle-kit is installed its further rollouts stay reachable from here.
_KIT_MODULES = {"MultiTurnCondenseRollout": "twinkle_agentic.rollout.multi_turn_condense"}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name) or _KIT_MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if name in _MODULES or error.name != module:
            raise
        raise AttributeError(f"{name} is part of twinkle-kit, which is not installed") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
