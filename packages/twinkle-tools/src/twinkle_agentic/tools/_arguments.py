"""What a model wrote as arguments: parsed, lightly repaired, checked against the tool's schema."""

from __future__ import annotations

import copy
import functools
import json
import logging
import marshal
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, cast

logger = logging.getLogger(__name__)

__all__ = ["ArgumentsError", "Validate", "compile_schema", "parse_arguments"]

_MAX_REPORTED = 5  # schema violations named in one error; more only cost the model's context


class ArgumentsError(ValueError):
    """Arguments that are no JSON object, or do not fit the tool's schema."""


class Validate(Protocol):
    """Raises `ArgumentsError` for arguments that do not fit the schema."""

    def __call__(self, arguments: dict[str, Any], /) -> None:
        """Check one set of arguments."""


def parse_arguments(raw: object) -> dict[str, Any]:
    """Turn the `arguments` of a tool call into a dict.

    Two repairs are made, where the meaning is certain: nothing at all (`None`, blank text, `null`)
    is an empty object, and a JSON string that holds an object is that object (some models encode
    twice).

    Args:
        raw: JSON text or an object.

    Returns:
        A new object: a tool may change it without changing the conversation.

    Raises:
        ArgumentsError: It is no JSON, holds NaN or an infinity, or is not an object.
    """
    value = raw
    try:
        for _ in range(2):
            if not isinstance(value, str):
                break
            if not value.strip():
                return {}
            value = json.loads(value, parse_constant=_refuse_constant, parse_float=_finite)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ArgumentsError(f"arguments must be a JSON object, found {type(value).__name__}")
        found = cast("dict[str, Any]", value)
        return _copied(found) if value is raw else found
    except RecursionError:
        raise ArgumentsError("invalid JSON in arguments: nested too deeply") from None
    except ArgumentsError:
        raise
    except ValueError as error:
        raise ArgumentsError(f"invalid JSON in arguments: {error}") from None


def compile_schema(schema: object, *, tool_name: str) -> Validate:
    """Compile the JSON Schema of a tool's parameters into a check.

    Args:
        schema: JSON Schema (draft 2020-12 unless `$schema` names another). Keywords it does not
            know are ignored, and so, with a warning in the log, is a `pattern` that Python cannot
            compile. References must lead to something inside the schema: nothing is ever fetched.
        tool_name: For the messages.

    Returns:
        The check; it pickles.

    Raises:
        ValueError: The schema itself is invalid.
    """
    # A rollout makes a manager per trajectory, all with the same schemas, and compiling takes
    # milliseconds. marshal tells apart what equality does not (1 and True), and copies.
    try:
        key = marshal.dumps(cast("Any", schema), 2)
    except ValueError:  # some other mapping
        return _compile(schema, tool_name)
    return _compiled(key, tool_name)


@functools.lru_cache(maxsize=1024)
def _compiled(key: bytes, tool_name: str) -> Validate:
    return _compile(marshal.loads(key), tool_name)


def _compile(schema: object, tool_name: str) -> Validate:
    # jsonschema takes 60 ms to import; a process that only defines environments never needs it.
    from jsonschema import Draft202012Validator, SchemaError, validators
    from referencing.jsonschema import EMPTY_REGISTRY

    problem = f"the parameters of tool {tool_name!r} are no valid JSON Schema"
    if not isinstance(schema, (Mapping, bool)):
        raise ValueError(f"{problem}: found {schema!r}")
    own: Any = (
        schema
        if isinstance(schema, bool)
        else copy.deepcopy(dict(cast("Mapping[str, Any]", schema)))
    )
    factory: Any = validators
    try:
        cls: Any = factory.validator_for(own, default=Draft202012Validator)
        cls.check_schema(own, format_checker=None)
    except SchemaError as error:
        raise ValueError(f"{problem}: {error.message} (at {error.json_path})") from error
    except Exception as error:  # a `$schema` that is no text, say
        raise ValueError(f"{problem}: {type(error).__name__}: {error}") from error
    cls = factory.extend(cls, {"pattern": _pattern_check(cls, tool_name)})
    try:
        _resolve_references(own, cls)
    except Exception as error:  # referencing has many, all of the kind "leads nowhere"
        raise ValueError(f"{problem}: a $ref leads nowhere: {error}") from error
    return _SchemaCheck(own, tool_name, cls(own, registry=EMPTY_REGISTRY))


class _SchemaCheck:
    """A compiled schema."""

    def __init__(self, schema: Any, tool_name: str, validator: Any) -> None:
        self._schema = schema
        self._tool_name = tool_name
        self._errors = validator.iter_errors

    def __call__(self, arguments: dict[str, Any], /) -> None:
        try:
            errors = list(self._errors(arguments))
        except RecursionError:
            raise ArgumentsError("arguments are nested too deeply") from None
        if errors:
            raise ArgumentsError("; ".join(_reported(errors[:_MAX_REPORTED])))

    def __reduce__(self) -> tuple[Any, ...]:
        return _recompile, (self._schema, self._tool_name)


def _recompile(schema: Any, tool_name: str) -> Validate:
    return compile_schema(schema, tool_name=tool_name)


def _reported(errors: list[Any]) -> Iterator[str]:
    for error in errors:
        where = error.json_path.removeprefix("$").removeprefix(".") or "arguments"
        yield f"{where[:100]}: {error.message[:300]}"


def _resolve_references(schema: Any, cls: Any) -> None:
    """Look up every `$ref` once, so that a broken one shows at registration."""
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY, specification_with

    dialect = specification_with(cls.META_SCHEMA.get("$schema", ""), default=DRAFT202012)
    root = Resource(contents=schema, specification=dialect)
    resolver: Any = EMPTY_REGISTRY.with_resource(root.id() or "", root).resolver_with_root(root)
    seen: list[tuple[Any, Any]] = [(resolver, root)]
    while seen:
        resolver, resource = seen.pop()
        contents = resource.contents
        if isinstance(contents, dict) and "$ref" in contents:
            resolver.lookup(contents["$ref"])
        for inner in resource.subresources():
            seen.append((resolver.in_subresource(inner), inner))  # noqa: PERF401


def _pattern_check(cls: Any, tool_name: str) -> Any:
    """Make the check of `pattern`, which lets pass what Python cannot compile."""
    original = cls.VALIDATORS.get("pattern")
    unusable: set[str] = set()

    def check(validator: Any, pattern: str, instance: object, schema: Any) -> Iterable[Any]:
        if not isinstance(instance, str) or pattern in unusable:
            return ()
        try:
            re.compile(pattern)
        except re.error as error:
            unusable.add(pattern)
            logger.warning("tool %s: pattern %r is not checked: %s", tool_name, pattern, error)
            return ()
        return original(validator, pattern, instance, schema)

    return check


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_checked_name(name): _copied(item) for name, item in items}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in cast("Iterable[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        _refuse_constant(str(value))
    return value


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"names must be text, found {name!r}")
    return name


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:50]} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
