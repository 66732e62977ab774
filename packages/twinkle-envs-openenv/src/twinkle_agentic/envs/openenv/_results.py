"""What an environment answers: over the wire, for scoring code, and in process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.envs.openenv._rendering import observation_fields

__all__ = ["InProcessResult", "RawResult", "WireObservation", "metadata_of", "read_result"]


class WireObservation(dict[str, Any]):
    """The fields of an observation, by key and by attribute.

    With the environment's package installed an observation is an object of its class; reading
    fields as attributes works on both.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the observation has no field {name!r}, it has {sorted(self)}"
            ) from None


@dataclass(slots=True, kw_only=True)
class RawResult:
    """One answer of the server.

    Attributes:
        observation: Its fields, without reward and done.
        reward: As the server gave it; `None` where it gave none.
        done: The episode is over.
        metadata: What the environment says beside the observation.
    """

    observation: WireObservation
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, data: dict[str, Any]) -> RawResult:
        """Read the `data` of an observation frame."""
        fields: Any = data.get("observation")
        if not isinstance(fields, dict):
            fields = {"value": fields}
        observation = WireObservation(cast("dict[str, Any]", fields))
        metadata: Any = data.get("metadata") or observation.get("metadata") or {}
        if not isinstance(metadata, dict):
            metadata = {"value": metadata}
        return cls(
            observation=observation,
            reward=data.get("reward"),
            done=bool(data.get("done", False)),
            metadata=cast("dict[str, Any]", metadata),
        )


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
            inner, fields.get("reward"), bool(fields.get("done", False)), metadata_of(inner, fields)
        )
    model_fields: Any = getattr(cast("type[Any]", type(result)), "model_fields", {})
    is_observation = {"reward", "done"} <= set(model_fields)
    if not is_observation and hasattr(result, "observation"):
        return InProcessResult(
            result.observation,
            getattr(result, "reward", None),
            bool(getattr(result, "done", False)),
            metadata_of(result.observation, result),
        )
    if is_observation or hasattr(result, "done") or hasattr(result, "reward"):
        return InProcessResult(
            result,
            getattr(result, "reward", None),
            bool(getattr(result, "done", False)),
            metadata_of(result),
        )
    if isinstance(result, str):
        return InProcessResult(result)
    raise EnvError(
        f"the environment returned {type(result).__name__} {result!r}: expected an OpenEnv "
        "Observation"
    )


def metadata_of(*sources: Any) -> dict[str, Any]:
    """Return the metadata of the first of these, mappings or objects, that has any."""
    for source in sources:
        found: Any = getattr(source, "metadata", None)
        if found is None and isinstance(source, Mapping):
            found = cast("Mapping[str, Any]", source).get("metadata")
        if isinstance(found, Mapping) and found:
            return dict(cast("Mapping[str, Any]", found))
        if found is not None and observation_fields(found):
            return observation_fields(found) or {}
    return {}
