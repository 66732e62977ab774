"""A typed Python function as a tool."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from typing import Any, cast

from twinkle_agentic._aio.bounded import finish
from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.tools._arguments import ArgumentsError
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["FunctionTool"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # what chat-completions endpoints accept
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\(.*?\))?:\s*(.*)$")


class FunctionTool(Tool):
    """Wraps a function; its signature and docstring become the definition shown to the model.

    Annotations become JSON Schema through pydantic, and arguments arrive converted: a dataclass, an
    enum or a date is what the function gets. The first paragraph of the docstring describes the
    tool, a Google-style `Args:` section its parameters. A coroutine function is awaited. It pickles
    if the function does.

    Args:
        function: Takes keyword arguments; without annotation any JSON value is accepted.
        name: In place of `function.__name__`.
        description: In place of the docstring's first paragraph.
        timeout_s: Seconds a call may take; `None` leaves it to the manager.

    Raises:
        TypeError: `function` cannot be called, has positional-only or `*args`/`**kwargs`
            parameters, or an annotation that no JSON value can be converted to.
        ValueError: The name is not one that endpoints accept, or `timeout_s` is not above 0.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> FunctionTool(add)("add", {"a": 2})
        3
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        check_limit("timeout_s", timeout_s, allow_none=True)
        if not callable(function):
            raise TypeError(f"FunctionTool wraps a function, found {function!r}")
        self.function = function
        self.timeout_s = timeout_s
        self.name = getattr(function, "__name__", "") if name is None else name
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a tool name has 1 to 64 letters, digits, _ or -, found {self.name!r}: pass name="
            )
        plain = _plain_function(function)
        summary, about = _read_docstring(inspect.getdoc(plain) or "")
        self._description = summary if description is None else description
        self._is_async = inspect.iscoroutinefunction(plain)
        self._model, self._parameters = _arguments_model(function, self.name, about)
        self._info: ToolInfo = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self._description,
                "parameters": _parameters_schema(self._model, self.name),
            },
        }

    def tool_info(self) -> ToolInfo:
        """Return the definition derived from the signature."""
        return self._info

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Convert the arguments and call the function; a coroutine is run to its end.

        Raises:
            ArgumentsError: The arguments do not fit the annotations.
            Exception: Whatever the function raises.
        """
        return finish(self.function(**self._convert(arguments)))

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Await a coroutine function; run any other in a thread. Raises as `__call__`."""
        values = self._convert(arguments)
        if self._is_async:
            return await self.function(**values)
        return await run_blocking(self.function, **values)

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(
            type(self),
            name=self.name,
            description=self._description,
            timeout_s=self.timeout_s,
        )
        return make, (self.function,)

    def _convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        from pydantic import ValidationError

        try:
            model = self._model.model_validate(arguments)
        except ValidationError as error:
            raise ArgumentsError("; ".join(map(_violation, error.errors()[:5]))) from None
        # Parameters that were not given keep the function's own default objects.
        given = model.model_fields_set
        return {name: getattr(model, fld) for fld, name in self._parameters.items() if fld in given}


def _plain_function(function: Callable[..., Any]) -> Any:
    """Return what carries the docstring and the kind: inside a partial, behind an instance."""
    while isinstance(function, functools.partial):
        function = function.func  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__


def _arguments_model(
    function: Callable[..., Any], name: str, about: dict[str, str]
) -> tuple[Any, dict[str, str]]:
    """Make the model of the arguments, and the parameter that each of its fields fills.

    The fields have names of their own, for a parameter may be called `json`, `copy` or `_x`.
    """
    from pydantic import ConfigDict, Field, create_model

    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, ValueError, TypeError, SyntaxError, AttributeError) as error:
        raise TypeError(f"the signature of {name!r} cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    parameters: dict[str, str] = {}
    for number, parameter in enumerate(signature.parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"parameter {str(parameter)!r} of {name!r} cannot be filled from a JSON object: "
                "use plain or keyword-only parameters"
            )
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        default = ... if parameter.default is parameter.empty else parameter.default
        field = Field(default, alias=parameter.name, description=about.get(parameter.name))
        fields[f"argument_{number}"] = (annotation, field)
        parameters[f"argument_{number}"] = parameter.name
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        return create_model(f"{name}_arguments", __config__=config, **fields), parameters
    except Exception as error:  # pydantic has many, and annotations bring code of their own
        raise TypeError(f"the annotations of {name!r} make no JSON Schema: {error}") from error


def _parameters_schema(model: Any, name: str) -> dict[str, Any]:
    from pydantic import PydanticUserError
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        # A default that JSON cannot hold is left out of the schema; the function has it.
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    try:
        schema: dict[str, Any] = model.model_json_schema(schema_generator=Quiet)
    except PydanticUserError as error:
        raise TypeError(f"the annotations of {name!r} make no JSON Schema: {error}") from error
    _leave_out_nan(schema)
    schema.pop("title", None)
    for field in schema.get("properties", {}).values():
        field.pop("title", None)
    return schema


def _leave_out_nan(schema: Any) -> None:
    """Take out defaults that hold NaN or an infinity, for no endpoint reads such a definition."""
    if isinstance(schema, list):
        for item in cast("list[Any]", schema):
            _leave_out_nan(item)
    if not isinstance(schema, dict):
        return
    fields = cast("dict[str, Any]", schema)
    for value in fields.values():  # first: a parameter may be called `default`
        _leave_out_nan(value)
    try:
        json.dumps(fields.get("default"), allow_nan=False)
    except ValueError:
        del fields["default"]


def _violation(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "arguments"
    return f"{where[:100]}: {error['msg'][:300]}"


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its first paragraph and its arguments."""
    about: dict[str, str] = {}
    first: list[str] = []
    inside, in_summary, current, margin = False, True, "", 0
    for line in text.strip().splitlines():
        section = _SECTION.match(line)
        in_summary = in_summary and bool(line.strip()) and not section
        if in_summary:
            first.append(line.strip())
        if section:
            inside, current = section[1] in ("Args", "Arguments", "Parameters"), ""
        if section or not inside or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        argument = _ARGUMENT.match(line.strip())
        if argument and (not current or indent <= margin):
            current, margin = argument[1], indent
            about[current] = argument[2]
        elif current:
            about[current] += " " + line.strip()
    return " ".join(first), about
