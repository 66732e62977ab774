"""Tools for the model, from what a server or an environment says of its actions.

The input is JSON Schema as OpenEnv's `GET /schema` gives it, or an MCP tool listing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from twinkle_agentic.envs.openenv._action_docs import read_action_docs
from twinkle_agentic.envs.openenv._protocol import describe_field_errors
from twinkle_agentic.envs.openenv._visible import is_offered
from twinkle_agentic.envs.openenv.errors import ActionRefusedError
from twinkle_agentic.tools.types import ToolInfo

__all__ = [
    "ENV_ACTION",
    "RUN_PYTHON",
    "ActionKind",
    "action_fields",
    "action_kind",
    "action_properties",
    "check_fields",
    "misfit",
    "offered_tools",
    "schema_of",
    "tool_from_action",
    "tool_name",
    "tools_from_mcp",
]

ENV_ACTION = "env_action"
"""Name of the one tool of an environment whose actions have no names of their own."""

RUN_PYTHON: ToolInfo = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Run Python code in the environment and read what it printed.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python source code."}},
            "required": ["code"],
        },
    },
}

ActionKind = Literal["code", "mcp", "fields"]
"""What an action is: code to run, a call of an MCP tool, or fields of its own."""

_OF_THE_FRAMEWORK = ("metadata",)  # on every action; of no use to a model


def action_kind(schema: Mapping[str, Any] | None) -> ActionKind:
    """Tell what an action schema describes; `code` where there is none.

    Code is an action whose one field is `code`. With others beside it, it may be in any language.
    """
    if schema is None:
        return "code"
    if _is_mcp_call(schema) or _is_mcp_union(schema):
        return "mcp"
    fields = action_properties(schema).keys() - set(_OF_THE_FRAMEWORK)
    return "code" if fields <= {"code"} else "fields"


def action_properties(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of an action schema."""
    found: Any = (schema or {}).get("properties")
    return dict(cast("dict[str, Any]", found)) if isinstance(found, Mapping) else {}


def offered_tools(
    schema: Mapping[str, Any] | None,
    *,
    env_name: str | None = None,
    hide: Collection[str] = (),
) -> list[ToolInfo]:
    """Return the one tool of an environment without MCP tools: `run_python` or `env_action`."""
    if schema is None or action_kind(schema) != "fields":
        return [_run_python(schema or {})]
    return [tool_from_action(schema, env_name=env_name, hide=hide)]


def _run_python(schema: Mapping[str, Any]) -> ToolInfo:
    """Make `run_python`, in the words of the action where it has any of its own."""
    tool = copy.deepcopy(RUN_PYTHON)
    function: dict[str, Any] = tool["function"]  # type: ignore[assignment]  # pyright: ignore[reportTypedDictNotRequiredAccess, reportAssignmentType]
    field = action_properties(schema).get("code")
    said, about = read_action_docs(str(schema.get("description") or ""), ("code",))
    if isinstance(field, Mapping) and (described := cast("Any", field).get("description")):
        about["code"] = str(described)
    if said:
        function["description"] = said
    if "code" in about:
        function["parameters"]["properties"]["code"]["description"] = about["code"]
    return tool


def tool_from_action(
    schema: Mapping[str, Any], *, env_name: str | None = None, hide: Collection[str] = ()
) -> ToolInfo:
    """Make one tool, `env_action`, whose parameters are the fields of the action.

    What the docstring of the action says of its fields describes those that have no description.

    Args:
        schema: JSON Schema of the action.
        env_name: For the description where the action has none.
        hide: Names of fields to leave out, besides secrets and settings; required ones never are.
    """
    required = set(schema.get("required", ()))
    fields = {
        name: field
        for name, field in action_properties(schema).items()
        if is_offered(name, required=name in required, hide=hide)
    }
    said, about = read_action_docs(str(schema.get("description") or ""), action_properties(schema))
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {
            name: _described(_without_title(field), about.get(name))
            for name, field in fields.items()
        },
        "required": [name for name in schema.get("required", ()) if name in fields],
    }
    if "$defs" in schema:
        parameters["$defs"] = schema["$defs"]
    where = f" in {env_name}" if env_name else ""
    return {
        "type": "function",
        "function": {
            "name": ENV_ACTION,
            "description": said or f"Take an action{where}.",
            "parameters": parameters,
        },
    }


def tools_from_mcp(listing: Sequence[Any]) -> list[ToolInfo]:
    """Make tools from an MCP listing, of the JSON-RPC form or of OpenEnv's own."""
    tools: list[ToolInfo] = []
    for entry in listing:
        if not isinstance(entry, Mapping):
            continue
        tool = cast("Mapping[str, Any]", entry)
        schema: Any = tool.get("inputSchema") or tool.get("input_schema")
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": str(tool.get("name", "")),
                    "description": str(tool.get("description") or ""),
                    "parameters": dict(schema) if schema else {"type": "object", "properties": {}},
                },
            }
        )
    return [tool for tool in tools if tool_name(tool)]


def schema_of(action_cls: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of an Action class; `None` where there is none."""
    describe = getattr(action_cls, "model_json_schema", None)
    try:
        return cast("dict[str, Any]", describe()) if callable(describe) else None
    except Exception:  # a field that JSON Schema cannot describe, such as a tensor
        return None


def action_fields(
    tool: str,
    arguments: Mapping[str, Any],
    schema: Mapping[str, Any] | None,
    *,
    takes_mcp_calls: bool,
) -> dict[str, Any]:
    """Make the fields of an action from a tool call: its arguments, or the call of an MCP tool.

    Where actions are calls of MCP tools, arguments that spell out such a call are it already.
    """
    spelt_out = "tool_name" in arguments and set(arguments) <= {"type", "tool_name", "arguments"}
    if not takes_mcp_calls or spelt_out:
        return dict(arguments)
    call: dict[str, Any] = {"tool_name": tool, "arguments": dict(arguments)}
    known = action_properties(schema or {})
    return {"type": "call_tool", **call} if not known or "type" in known else call


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool definition, empty where it has none."""
    function: Any = tool.get("function") or {}
    return str(function.get("name") or "")


def check_fields(fields: Mapping[str, Any], schema: Mapping[str, Any] | None) -> None:
    """Check the field names of an action against its schema.

    Only what is certain is checked here, names: the server converts values more leniently than JSON
    Schema (`"5"` for 5), and has the last word on them.

    Raises:
        ActionRefusedError: A required field is missing, or one is there that the action does not
            have.
    """
    if schema is None:
        return
    known = action_properties(schema)
    if not known:
        return
    missing = [name for name in schema.get("required", ()) if name not in fields]
    strict = schema.get("additionalProperties") is False
    unknown = [name for name in fields if name not in known] if strict else []
    errors = [{"loc": [n], "type": "missing", "msg": "Field required"} for n in missing]
    errors += [
        {"loc": [n], "type": "extra_forbidden", "msg": "Extra inputs are not permitted"}
        for n in unknown
    ]
    if errors:
        raise misfit(errors, known)


def misfit(errors: list[dict[str, Any]], fields: Iterable[str]) -> ActionRefusedError:
    """Make the error of arguments that fit no action, the same on client and server.

    Args:
        errors: In pydantic's form.
        fields: Names of those that the action has.
    """
    takes = ", ".join(name for name in fields if is_offered(name, required=False))
    message = f"the arguments do not fit: {describe_field_errors(errors)}"
    return ActionRefusedError(
        message + (f"; the fields are {takes}" if takes else ""), errors=errors
    )


def _is_mcp_union(schema: Mapping[str, Any]) -> bool:
    variants: Any = schema.get("oneOf") or schema.get("anyOf") or ()
    defs: Any = schema.get("$defs") or {}
    for variant in variants:
        name = str(variant.get("$ref", "")).rsplit("/", 1)[-1]
        resolved: Any = defs.get(name, variant)
        if _is_mcp_call(resolved):
            return True
    return False


def _is_mcp_call(schema: Mapping[str, Any]) -> bool:
    """Whether a tool's name and arguments are a whole action; some want more, such as a kind."""
    call = {"tool_name", "arguments"}
    required = set(schema.get("required", ()))
    return call <= action_properties(schema).keys() and required <= {*call, "type"}


def _described(field: Any, text: str | None) -> Any:
    if text is None or not isinstance(field, Mapping) or "description" in field:
        return cast("Any", field)
    return {**cast("Mapping[str, Any]", field), "description": text}


def _without_title(about: Any) -> Any:
    if isinstance(about, Mapping):
        described = cast("Mapping[str, Any]", about)
        return {key: value for key, value in described.items() if key != "title"}
    return about
