"""What an environment returns in process: an Observation with its own reward and done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.envs.openenv.rendering import observation_fields

__all__ = ["InProcessResult", "read_result"]


@dataclass(frozen=True, slots=True)
class InProcessResult:
    """One answer of an embedded environment.

    Attributes:
        observation: As the environment made it, for a renderer.
        reward: As the environment gave it; `None` where it gave none.
        done: The episode is over.
        metadata: What it says beside the observation.
    """

    observation: Any
    reward: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def read_result(result: Any) -> InProcessResult:
    """Find observation, reward and done in what `reset` or `step` returned.

    An Observation may have a field named `observation`; it is still an Observation.

    Raises:
        EnvError: It is nothing of the kind.
    """
    if isinstance(result, Mapping):
        fields = cast("Mapping[str, Any]", result)
        inner: Any = fields.get("observation", fields)
        return InProcessResult(
            inner, fields.get("reward"), bool(fields.get("done", False)), _metadata(inner, fields)
        )
    model_fields: Any = getattr(cast("type[Any]", type(result)), "model_fields", {})
    is_observation = {"reward", "done"} <= set(model_fields)
    if not is_observation and hasattr(result, "observation"):
        return InProcessResult(
            result.observation,
            getattr(result, "reward", None),
            bool(getattr(result, "done", False)),
            _metadata(result.observation, result),
        )
    if is_observation or hasattr(result, "done") or hasattr(result, "reward"):
        return InProcessResult(
            result,
            getattr(result, "reward", None),
            bool(getattr(result, "done", False)),
            _metadata(result),
        )
    if isinstance(result, str):
        return InProcessResult(result)
    raise EnvError(
        f"the environment returned {type(result).__name__} {result!r}: expected an OpenEnv "
        "Observation"
    )


def _metadata(*sources: Any) -> dict[str, Any]:
    for source in sources:
        found: Any = getattr(source, "metadata", None)
        if found is None and isinstance(source, Mapping):
            found = cast("Mapping[str, Any]", source).get("metadata")
        if isinstance(found, Mapping) and found:
            return dict(cast("Mapping[str, Any]", found))
        if found is not None and observation_fields(found):
            return observation_fields(found) or {}
    return {}
