"""What a server answered, as it is: for scoring code that reads fields instead of text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

__all__ = ["RawResult", "WireObservation"]


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
