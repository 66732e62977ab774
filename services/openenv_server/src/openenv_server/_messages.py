"""The messages of OpenEnv's protocol, as JSON."""

from __future__ import annotations

import importlib
import json
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import to_json

__all__ = [
    "error_message",
    "field_errors",
    "mapping",
    "message",
    "observation_data",
    "parse_action",
]

_MCP_ACTIONS = {"list_tools": "ListToolsAction", "call_tool": "CallToolAction"}
_MCP_MODULE = "openenv.core.env_server.mcp_types"


def message(kind: str, data: Any) -> str:
    """Write one message. Infinity and NaN stay what they are; a client must not take them for 0."""
    return to_json({"type": kind, "data": data}, inf_nan_mode="constants").decode()


def mapping(value: Any) -> dict[str, Any]:
    """Return a JSON object as it is, and an empty one for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def error_message(code: str, text: str, **data: Any) -> str:
    """Write an error."""
    return message("error", {"message": text, "code": code, **data})


def field_errors(error: ValidationError) -> list[dict[str, Any]]:
    """Return what is wrong with which field, as plain data."""
    return json.loads(error.json(include_url=False, include_context=False))


def parse_action(data: Any, action_cls: type[Any]) -> Any:
    """Make an action of its fields.

    An environment that takes OpenEnv's MCP actions, or any action, gets them by their `type`.

    Raises:
        ValidationError: They do not fit.
    """
    name = _MCP_ACTIONS.get(str(mapping(data).get("type")))
    is_base = action_cls.__module__.startswith("openenv.core.") and action_cls.__name__ == "Action"
    if name is not None and (is_base or action_cls.__module__ == _MCP_MODULE):
        mcp_cls: Any = getattr(importlib.import_module(_MCP_MODULE), name)
        return mcp_cls.model_validate(data)
    return action_cls.model_validate(data)


def observation_data(observation: Any) -> dict[str, Any]:
    """Return the `data` of an observation: its fields, with reward and done beside them."""
    data: dict[str, Any] = {
        "observation": observation.model_dump(exclude={"reward", "done"}),
        "reward": observation.reward,
        "done": observation.done,
    }
    if observation.metadata:
        data["metadata"] = observation.metadata
    return data
