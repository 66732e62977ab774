"""Between an action and its JSON, an answer and its object: typed or plain.

The client class is never connected: only its conversions are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from twinkle_agentic.envs.errors import EnvError
from twinkle_agentic.envs.openenv._results import RawResult, WireObservation
from twinkle_agentic.envs.openenv._tool_schemas import action_kind, check_fields, misfit, schema_of
from twinkle_agentic.envs.openenv.errors import ActionRefusedError

__all__ = ["Binding", "TypedBinding", "WireBinding", "build_action"]


class Binding(Protocol):
    """How actions and answers are converted."""

    name: str | None
    """The client class as `module:Class`; `None` without one."""

    @property
    def takes_mcp_calls(self) -> bool:
        """Whether actions are calls of MCP tools."""
        ...

    def to_payload(self, action: Any) -> dict[str, Any]:
        """Turn an action, or its fields, into JSON values; raises `ActionRefusedError`."""
        ...

    def parse_result(self, data: dict[str, Any]) -> Any:
        """Turn an answer into an object with `observation` and the server's `reward` and `done`.

        Raises:
            EnvError: The answer cannot be read.
        """
        ...

    def parse_state(self, data: dict[str, Any]) -> Any:
        """Turn a state answer into an object; raises `EnvError`."""
        ...


class WireBinding:
    """Plain dicts, checked against the server's action schema.

    Args:
        schema: JSON Schema of the action; `None` checks nothing.
        action_cls: Makes an action of its fields before it is sent, where given.
    """

    name: str | None = None

    def __init__(self, schema: Mapping[str, Any] | None, action_cls: Any | None = None) -> None:
        self.schema = schema
        self.action_cls = action_cls

    @property
    def takes_mcp_calls(self) -> bool:
        """Whether the server's action is a call of an MCP tool."""
        return self.schema is not None and action_kind(self.schema) == "mcp"

    def to_payload(self, action: Any) -> dict[str, Any]:
        """Check the field names and return the fields."""
        if self.action_cls is not None and isinstance(action, Mapping):
            action = build_action(self.action_cls, cast("Mapping[str, Any]", action))
        fields = _plain_fields(action)
        if not self.takes_mcp_calls:  # its listing action does not fit the schema of its calls
            check_fields(fields, self.schema)
        return fields

    def parse_result(self, data: dict[str, Any]) -> RawResult:
        """Return the fields of the answer."""
        return RawResult.of(data)

    def parse_state(self, data: dict[str, Any]) -> WireObservation:
        """Return the fields of the state."""
        return WireObservation(data)


class TypedBinding:
    """The conversions of an OpenEnv client class.

    Args:
        client: An instance of it, unconnected.
        action_cls: Makes an action of its fields; `None` leaves dicts to the client.
    """

    def __init__(self, client: Any, action_cls: Any | None) -> None:
        cls = cast("type[Any]", type(client))
        self.name: str | None = f"{cls.__module__}:{cls.__qualname__}"
        self._client = client
        self._action_cls = action_cls
        schema = schema_of(action_cls)
        self._takes_mcp_calls = schema is not None and action_kind(schema) == "mcp"

    @property
    def takes_mcp_calls(self) -> bool:
        """Whether the action class is OpenEnv's `CallToolAction` or one like it."""
        return self._takes_mcp_calls

    def to_payload(self, action: Any) -> dict[str, Any]:
        """Build the typed action and let the client class turn it into JSON values."""
        if isinstance(action, Mapping) and self._action_cls is not None:
            action = build_action(self._action_cls, cast("Mapping[str, Any]", action))
        try:
            payload: Any = self._client._step_payload(action)
        except Exception as error:
            raise ActionRefusedError(
                f"{self.name} cannot send the action {action!r}: {type(error).__name__}: {error}"
            ) from error
        return _plain_fields(payload)

    def parse_result(self, data: dict[str, Any]) -> Any:
        """Let the client class read the answer.

        Some look for reward and done inside the observation, where they never are, so these two are
        taken from the answer itself.
        """

        def parse(data: dict[str, Any]) -> Any:
            result = self._client._parse_result(data)
            reward, done = data.get("reward"), bool(data.get("done", False))
            if result.reward != reward or result.done != done:
                result.reward, result.done = reward, done
            return result

        return self._parsed(parse, data)

    def parse_state(self, data: dict[str, Any]) -> Any:
        """Let the client class read the state."""
        return self._parsed(self._client._parse_state, data)

    def _parsed(self, parse: Any, data: dict[str, Any]) -> Any:
        try:
            return parse(data)
        except Exception as error:
            raise EnvError(
                f"{self.name} cannot read the server's answer ({type(error).__name__}: {error}): "
                "the installed package and the server are of different versions; install the "
                "server's, or uninstall it here to use plain dicts"
            ) from error


def build_action(action_cls: Any, fields: Mapping[str, Any]) -> Any:
    """Make an action from its fields.

    Raises:
        ActionRefusedError: They do not fit; the message names the fields.
    """
    validate = getattr(action_cls, "model_validate", None)
    try:
        return validate(dict(fields)) if callable(validate) else action_cls(**fields)
    except Exception as error:
        listed = getattr(error, "errors", None)
        found: Any = listed() if callable(listed) else []
        if not found:
            raise ActionRefusedError(
                f"the arguments do not fit: {type(error).__name__}: {error}"
            ) from error
        errors = [{"loc": list(e.get("loc", ())), "msg": e.get("msg")} for e in found]
        raise misfit(errors, getattr(action_cls, "model_fields", ())) from error


def _plain_fields(action: Any) -> dict[str, Any]:
    if isinstance(action, Mapping):
        return dict(cast("Mapping[str, Any]", action))
    dump = getattr(action, "model_dump", None)
    if callable(dump):
        return cast("dict[str, Any]", dump(mode="json", exclude_defaults=False))
    raise ActionRefusedError(
        f"an action must be a dict of fields or an Action, found {type(action).__name__} {action!r}"
    )
