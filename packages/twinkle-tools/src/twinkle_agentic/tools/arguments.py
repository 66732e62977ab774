"""What a model wrote as arguments: parsed, lightly repaired, checked against the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

__all__ = ["ArgumentsError", "Validate", "compile_schema", "parse_arguments"]

Validate = Callable[[dict[str, Any]], None]
"""Raises `ArgumentsError` for arguments that do not fit the schema."""

_MAX_REPORTED = 5  # schema violations named in one error; more only cost the model's context


class ArgumentsError(ValueError):
    """Arguments that are no JSON object, or do not fit the tool's schema."""


def parse_arguments(raw: object) -> dict[str, Any]:
    """Turn the `arguments` of a tool call into a dict.

    Two repairs are made, where the meaning is certain: nothing at all (`None`, blank text, `null`) is an
    empty object, and a JSON string that holds an object is that object (some models encode twice).

    Args:
        raw: JSON text or an object.

    Returns:
        The object; a new dict unless `raw` is one.

    Raises:
        ArgumentsError: It is no JSON, holds NaN or an infinity, or is not an object.
    """
    value = raw
    for _ in range(2):
        if not isinstance(value, str):
            break
        if not value.strip():
            return {}
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except RecursionError:
            raise ArgumentsError("invalid JSON in arguments: nested too deeply") from None
        except ValueError as error:
            raise ArgumentsError(f"invalid JSON in arguments: {error}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ArgumentsError(f"arguments must be a JSON object, found {type(value).__name__}")
    return cast("dict[str, Any]", value)


def compile_schema(schema: Mapping[str, Any], *, tool_name: str) -> Validate:
    """Compile the JSON Schema of a tool's parameters into a check.

    Args:
        schema: JSON Schema (draft 2020-12 unless `$schema` says otherwise). Keywords it does not know are ignored.
        tool_name: For the messages.

    Raises:
        ValueError: The schema itself is invalid.
    """
    # jsonschema takes 60 ms to import; a process that only defines environments never needs it.
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    cls = validator_for(schema, default=Draft202012Validator)
    try:
        cls.check_schema(schema)
    except SchemaError as error:
        raise ValueError(
            f"the parameters of tool {tool_name!r} are no valid JSON Schema: {error.message} "
            f"(at {error.json_path})"
        ) from error
    validator = cls(schema)

    def validate(arguments: dict[str, Any]) -> None:
        try:
            errors = list(validator.iter_errors(arguments))
        except RecursionError:
            raise ArgumentsError("arguments are nested too deeply") from None
        if errors:
            reported = [
                f"{error.json_path.removeprefix('$').removeprefix('.') or 'arguments'}: {error.message[:300]}"
                for error in errors[:_MAX_REPORTED]
            ]
            raise ArgumentsError("; ".join(reported))

    return validate


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
