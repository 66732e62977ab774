"""A typed Python function as a tool."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.threads import run_blocking
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["FunctionTool"]

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class FunctionTool(Tool):
    """Wraps a function; its signature and docstring become the definition shown to the model.

    Annotations become JSON Schema through pydantic, and arguments arrive converted: a dataclass, an
    enum or a date is what the function gets. The first paragraph of the docstring describes the tool,
    a Google-style `Args:` section its parameters. A coroutine function is awaited.

    Args:
        function: Takes keyword arguments; without annotation any JSON value is accepted.
        name: In place of `function.__name__`.
        description: In place of the docstring's first paragraph.
        timeout_s: Seconds a call may take; `None` leaves it to the manager.

    Raises:
        TypeError: The signature has positional-only or `*args`/`**kwargs` parameters, or an annotation
            that no JSON value can be converted to.

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
        self.function = function
        self.timeout_s = timeout_s
        self.name = name or function.__name__
        summary, about = _read_docstring(inspect.getdoc(function) or "")
        self._model = _arguments_model(function, self.name, about)
        parameters: dict[str, Any] = self._model.model_json_schema()
        parameters.pop("title", None)
        for schema in parameters.get("properties", {}).values():
            schema.pop("title", None)
        self._info: ToolInfo = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": summary if description is None else description,
                "parameters": parameters,
            },
        }

    def tool_info(self) -> ToolInfo:
        """Return the definition derived from the signature."""
        return self._info

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Convert the arguments and call the function.

        Raises:
            pydantic.ValidationError: The arguments do not fit the annotations.
            Exception: Whatever the function raises.
        """
        values = self._convert(arguments)
        if inspect.iscoroutinefunction(self.function):
            return _run_alone(self.function, values)
        return self.function(**values)

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> Any:
        """Await a coroutine function; run any other in a thread. Raises as `__call__`."""
        values = self._convert(arguments)
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**values)
        return await run_blocking(self.function, **values)

    def _convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        model = self._model.model_validate(arguments)
        # Parameters that were not given keep the function's own default objects.
        return {name: getattr(model, name) for name in model.model_fields_set}


def _arguments_model(function: Callable[..., Any], name: str, about: dict[str, str]) -> Any:
    from pydantic import ConfigDict, Field, PydanticUserError, create_model

    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"parameter {str(parameter)!r} of {name!r} cannot be filled from a JSON object: "
                "use plain or keyword-only parameters"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints.get(parameter.name, Any),
            Field(default, description=about.get(parameter.name)),
        )
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        return create_model(f"{name}_arguments", __config__=config, **fields)
    except (PydanticUserError, NameError) as error:
        raise TypeError(f"the annotations of {name!r} make no JSON Schema: {error}") from error


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its first paragraph and its arguments."""
    summary = " ".join(text.split("\n\n", 1)[0].split())
    about: dict[str, str] = {}
    inside, current, margin = False, "", 0
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section:
            inside, current = section[1] in ("Args", "Arguments", "Parameters"), ""
            continue
        if not inside or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        argument = _ARGUMENT.match(line.strip())
        if argument and (not current or indent <= margin):
            current, margin = argument[1], indent
            about[current] = argument[2]
        elif current:
            about[current] += " " + line.strip()
    return summary, about


def _run_alone(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Run a coroutine function to its end, also where this thread already runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(function(**values))
    from twinkle_agentic.tools.threads import current_pool

    return current_pool().submit(lambda: asyncio.run(function(**values))).result()
