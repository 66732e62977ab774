"""From a tool call of a model to the tool, and back as text.

`ToolManager` never raises for what a model or a tool does wrong: the model reads the error and may try
again. Programs read `ToolOutcome.error_kind`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, cast

from twinkle_agentic.tools.arguments import (
    ArgumentsError,
    Validate,
    compile_schema,
    parse_arguments,
)
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.text import MAX_TEXT_CHARS, to_text
from twinkle_agentic.tools.threads import current_pool, run_blocking
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["ToolErrorKind", "ToolManager", "ToolOutcome"]

ToolErrorKind = Literal["bad_call", "unknown_tool", "invalid_arguments", "tool", "timeout"]
"""Why a call failed: not a call at all, no such tool, arguments refused, the tool raised, no answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What became of one tool call.

    Attributes:
        text: What the model sees: the result, or `Error: ...`.
        tool_name: The name called, `None` where the call had none.
        error: The error without its prefix; `None` on success.
        error_kind: Its class; `None` on success.
    """

    text: str
    tool_name: str | None = None
    error: str | None = None
    error_kind: ToolErrorKind | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    tool: Any
    validate: Validate | None


@dataclass(frozen=True, slots=True)
class _Ready:
    """A call that passed every check."""

    name: str
    tool: Any
    arguments: dict[str, Any]
    timeout_s: float | None


class ToolManager:
    """Tools by name, called with the tool-call dicts of a chat-completions message.

    Before a tool runs, the call is checked: known name, arguments a JSON object that fits the tool's
    schema. Results become text (`to_text`). Calls may come from several threads; whether one tool stands
    two calls at once is the tool's own affair.

    Args:
        tools: Tools, or a mapping from the name to serve each under. Anything with `tool_info()` and
            `__call__(tool_name, arguments)` is a tool.
        timeout_s: Seconds one call may take, for tools that have no `timeout_s` of their own; `None` waits
            without limit.
        max_result_chars: Characters kept of a result, head and tail; `None` keeps all.

    Raises:
        TypeError: `tools` is neither a mapping nor an iterable of tools.
        ValueError: A tool has no name or an invalid schema, or two tools of a list have the same name.

    Example:
        >>> manager = ToolManager([FunctionTool(lambda city: "sunny", name="weather")])
        >>> manager({"function": {"name": "weather", "arguments": '{"city": "Paris"}'}})
        'sunny'
    """

    def __init__(
        self,
        tools: Mapping[str, Any] | Iterable[Any] | None = None,
        *,
        timeout_s: float | None = None,
        max_result_chars: int | None = MAX_TEXT_CHARS,
    ) -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0 or None, found {timeout_s!r}")
        if max_result_chars is not None and max_result_chars < 1:
            raise ValueError(
                f"max_result_chars must be at least 1 or None, found {max_result_chars!r}"
            )
        self.timeout_s = timeout_s
        self.max_result_chars = max_result_chars
        self._entries: dict[str, _Entry] = {}
        if tools is None:
            return
        if isinstance(tools, Mapping):
            for name, tool in cast("Mapping[str, Any]", tools).items():
                self._entries[name] = _entry(tool, name)
            return
        if isinstance(tools, (str, bytes)) or not isinstance(tools, Iterable):
            raise TypeError(f"tools must be a mapping or an iterable of tools, found {tools!r}")
        for tool in tools:
            name = _name_of(tool)
            if name in self._entries:
                raise ValueError(
                    f"two tools are called {name!r}: rename one, or pass a dict to choose the names"
                )
            self._entries[name] = _entry(tool, name)

    def register(self, tool: Tool | Any) -> None:
        """Add a tool under its own name, in place of an earlier one of that name.

        Raises:
            ValueError: It has no name, or an invalid schema.
        """
        name = _name_of(tool)
        self._entries[name] = _entry(tool, name)

    def unregister(self, name: str) -> Any | None:
        """Remove a tool and return it; `None` where there is none of that name."""
        entry = self._entries.pop(name, None)
        return None if entry is None else entry.tool

    def names(self) -> list[str]:
        """Return the names in the order of registration."""
        return list(self._entries)

    def tools(self) -> list[Any]:
        """Return the tools in the order of registration."""
        return [entry.tool for entry in self._entries.values()]

    def copy(self) -> ToolManager:
        """Return a manager of its own with the same tools and limits."""
        twin = ToolManager(timeout_s=self.timeout_s, max_result_chars=self.max_result_chars)
        twin._entries = dict(self._entries)
        return twin

    def tool_infos(self) -> list[ToolInfo]:
        """Return the definitions to show to the model."""
        return [entry.tool.tool_info() for entry in self._entries.values()]

    def __call__(self, tool_call: Mapping[str, Any]) -> str:
        """Run one call and return the text for the model; never raises for a failed call."""
        return self.run(tool_call).text

    async def acall(self, tool_call: Mapping[str, Any]) -> str:
        """Run one call without blocking the event loop; the async twin of calling the manager."""
        return (await self.arun(tool_call)).text

    def run(self, tool_call: Mapping[str, Any]) -> ToolOutcome:
        """Run one call and tell how it went."""
        ready = self._prepare(tool_call)
        if isinstance(ready, ToolOutcome):
            return ready
        try:
            if ready.timeout_s is None:
                result = ready.tool(ready.name, ready.arguments)
            else:
                future = current_pool().submit(ready.tool, ready.name, ready.arguments)
                if not _done_within(future, ready.timeout_s):
                    return self._timed_out(ready, future)
                result = future.result()
            return self._succeeded(ready, result)
        except (Exception, SystemExit) as error:
            return _failed(ready, error)

    async def arun(self, tool_call: Mapping[str, Any]) -> ToolOutcome:
        """Run one call and tell how it went; cancelling it abandons the tool."""
        ready = self._prepare(tool_call)
        if isinstance(ready, ToolOutcome):
            return ready
        try:
            acall = getattr(ready.tool, "acall", None)
            work = (
                run_blocking(ready.tool, ready.name, ready.arguments)
                if acall is None
                else acall(ready.name, ready.arguments)
            )
            if ready.timeout_s is None:
                return self._succeeded(ready, await work)
            # A task of its own: a tool that swallows its cancellation must not hold the caller.
            task = asyncio.ensure_future(work)
            try:
                await asyncio.wait({task}, timeout=ready.timeout_s)
            except asyncio.CancelledError:
                task.cancel()
                raise
            if not task.done():
                return self._timed_out(ready, task)
            return self._succeeded(ready, task.result())
        except asyncio.CancelledError:
            _abandon(ready.tool, "the call was cancelled")
            raise
        except Exception as error:
            return _failed(ready, error)

    def _prepare(self, tool_call: object) -> _Ready | ToolOutcome:
        if not isinstance(tool_call, Mapping):
            return _refused(
                "bad_call", None, f"tool_call must be an object, found {type(tool_call).__name__}"
            )
        call = cast("Mapping[str, Any]", tool_call)
        function: object = call.get("function")
        if not isinstance(function, Mapping):
            return _refused("bad_call", None, 'tool_call has no "function" object')
        fields = cast("Mapping[str, Any]", function)
        name: object = fields.get("name")
        if not isinstance(name, str) or not name:
            return _refused("bad_call", None, 'tool_call has no "function.name"')
        entry = self._entries.get(name)
        if entry is None:
            available = ", ".join(sorted(self._entries)) or "(none)"
            return _refused(
                "unknown_tool", name, f"unknown tool {name[:200]!r}, available: {available}"
            )
        try:
            arguments = parse_arguments(fields.get("arguments"))
            if entry.validate is not None:
                entry.validate(arguments)
        except ArgumentsError as error:
            return _refused("invalid_arguments", name, f"tool {name!r}: {error}")
        timeout_s = getattr(entry.tool, "timeout_s", None)
        return _Ready(
            name, entry.tool, arguments, self.timeout_s if timeout_s is None else timeout_s
        )

    def _succeeded(self, ready: _Ready, result: object) -> ToolOutcome:
        return ToolOutcome(
            text=to_text(result, max_chars=self.max_result_chars), tool_name=ready.name
        )

    def _timed_out(self, ready: _Ready, running: Future[Any] | asyncio.Future[Any]) -> ToolOutcome:
        if isinstance(running, Future):
            current_pool().abandon(running)
        else:
            running.cancel()
        reason = f"no result within {ready.timeout_s:g} s"
        _abandon(ready.tool, reason)
        return _refused("timeout", ready.name, f"tool {ready.name!r} gave {reason}")


def _entry(tool: Any, name: str) -> _Entry:
    if not callable(tool) or not hasattr(tool, "tool_info"):
        raise ValueError(
            f"tool {name!r} is a {type(tool).__name__}, which has no tool_info() or cannot be called: "
            "wrap a plain function in FunctionTool"
        )
    parameters = tool.tool_info().get("function", {}).get("parameters")
    if not parameters:
        return _Entry(tool, None)
    return _Entry(tool, compile_schema(parameters, tool_name=name))


def _name_of(tool: Any) -> str:
    info: Any = tool.tool_info() if hasattr(tool, "tool_info") else None
    function: Any = info.get("function") if isinstance(info, dict) else None
    name: Any = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"tool {type(tool).__name__} must have a non-empty tool_info()['function']['name'], "
            f"found {info!r}"
        )
    return name


def _refused(kind: ToolErrorKind, name: str | None, message: str) -> ToolOutcome:
    return ToolOutcome(
        text=to_text(f"Error: {message}"), tool_name=name, error=message, error_kind=kind
    )


def _failed(ready: _Ready, error: BaseException) -> ToolOutcome:
    return _refused(
        "tool", ready.name, f"tool {ready.name!r} raised {type(error).__name__}: {error}"
    )


def _abandon(tool: Any, reason: str) -> None:
    abandon = getattr(tool, "abandon", None)
    if abandon is not None:
        abandon(reason)


def _done_within(future: Future[Any], timeout_s: float) -> bool:
    from concurrent.futures import wait

    return bool(wait([future], timeout=timeout_s).done)
