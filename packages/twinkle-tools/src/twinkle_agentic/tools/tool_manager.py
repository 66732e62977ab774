"""From a tool call of a model to the tool, and back as text.

`ToolManager` never raises for what a model or a tool does wrong: the model reads the error and may
try again. Programs read `ToolOutcome.error_kind`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, cast

from twinkle_agentic._aio.bounded import (
    cancel_without_waiting,
    finish,
    finish_async,
    is_cancelled,
    is_ctrl_c,
)
from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic._aio.threads import ThreadPool, current_pool, run_blocking
from twinkle_agentic.tools._arguments import (
    ArgumentsError,
    Validate,
    compile_schema,
    parse_arguments,
)
from twinkle_agentic.tools._outcome import ToolErrorKind, ToolOutcome, describe_error, refused
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.text import MAX_TEXT_CHARS, to_text
from twinkle_agentic.tools.types import ToolInfo

logger = logging.getLogger(__name__)

__all__ = ["ToolErrorKind", "ToolManager", "ToolOutcome"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A registered tool and the check of its arguments."""

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

    Before a tool runs, the call is checked: known name, arguments a JSON object that fits the
    tool's schema. Results become text (`to_text`). Calls may come from several threads; whether one
    tool stands two calls at once is the tool's own affair. It pickles if its tools do.

    Args:
        tools: Tools, or a mapping from the name to serve each under. Anything with `tool_info()`
            and `__call__(tool_name, arguments)` is a tool.
        timeout_s: Seconds one call may take, from the call on (waiting for a thread included), for
            tools that have no `timeout_s` of their own; `None` waits without limit.
        max_result_chars: Characters kept of a result, head and tail; `None` keeps all.

    Raises:
        TypeError: `tools` is neither a mapping nor an iterable of tools.
        ValueError: A tool has no name, an invalid schema or an unusable limit, or two tools of a
            list have the same name.

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
        check_limit("timeout_s", timeout_s, allow_none=True)
        if max_result_chars is not None and max_result_chars < 1:
            raise ValueError(
                f"max_result_chars must be at least 1 or None, found {max_result_chars!r}"
            )
        self.timeout_s = timeout_s
        self.max_result_chars = max_result_chars
        self._entries: dict[str, _Entry] = {}
        self._owned: list[Any] = []  # sessions to close
        if tools is None:
            return
        if isinstance(tools, Mapping):
            for name, tool in cast("Mapping[str, Any]", tools).items():
                self._entries[name] = _entry(tool, name)
            return
        if isinstance(tools, (str, bytes)) or not isinstance(cast("object", tools), Iterable):
            raise TypeError(f"tools must be a mapping or an iterable of tools, found {tools!r}")
        for tool in tools:
            name = _name_of(tool)
            if name in self._entries:
                raise ValueError(
                    f"two tools are called {name!r}: rename one, or pass a dict to choose the names"
                )
            self._entries[name] = _entry(tool, name)

    @classmethod
    def from_mcp(
        cls,
        target: str | Sequence[str],
        *,
        max_result_chars: int | None = MAX_TEXT_CHARS,
        **options: Any,
    ) -> Self:
        """Connect to an MCP server and make a manager of its tools; `close` it afterwards.

        All trajectories that use the manager share the session. For a session per trajectory use
        `twinkle_agentic.envs.mcp.McpEnv`, which the rollout opens and closes.

        Args:
            target: The URL of the server, or the command that starts it, as a list.
            max_result_chars: As for the manager.
            **options: As for `twinkle_agentic.tools.mcp.McpServer`: `headers`, `env`, `cwd`,
                `call_timeout_s`, `connect_timeout_s`.

        Raises:
            McpLostError: There is no such server.
            TimeoutError: It did not answer in time.
            ModuleNotFoundError: The extra is not installed.

        Example:
            >>> with ToolManager.from_mcp("http://localhost:8000/mcp") as manager:
            ...     manager.names()
            ['forecast']
        """
        from twinkle_agentic.tools.mcp import McpServer

        server = McpServer(target, **options).start()
        try:
            manager = cls(server.tools(), max_result_chars=max_result_chars)
        except BaseException:
            server.close()
            raise
        manager._owned.append(server)
        return manager

    def close(self) -> None:
        """Close the MCP sessions that `from_mcp` opened, if any. Idempotent."""
        while self._owned:
            self._owned.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def register(self, tool: Tool | Any) -> None:
        """Add a tool under its own name, in place of an earlier one of that name.

        Raises:
            ValueError: It has no name, an invalid schema or an unusable limit.
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
        """Return the definitions to show to the model, each under the name it is served by."""
        return [_renamed(entry.tool.tool_info(), name) for name, entry in self._entries.items()]

    def __call__(self, tool_call: Mapping[str, Any]) -> str:
        """Run one call and return the text for the model; never raises for a failed call."""
        return self.run(tool_call).text

    async def acall(self, tool_call: Mapping[str, Any]) -> str:
        """Run one call without blocking the event loop; the async twin of calling the manager."""
        return (await self.arun(tool_call)).text

    def run(self, tool_call: Mapping[str, Any]) -> ToolOutcome:
        """Run one call and return what became of it.

        Raises:
            KeyboardInterrupt: Ctrl-C while it ran; the tool is abandoned.
        """
        ready = self._prepare(tool_call)
        if isinstance(ready, ToolOutcome):
            return ready
        try:
            if ready.timeout_s is not None:
                return self._run_within(ready, ready.timeout_s)
            return self._succeeded(ready, _call(ready))
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            return self._failed(ready, error)

    async def arun(
        self, tool_call: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> ToolOutcome:
        """Run one call and return what became of it; cancelling it abandons the tool.

        Args:
            tool_call: As the model wrote it.
            timeout_s: A limit of this call, next to those of the tool and the manager.
        """
        ready = self._prepare(tool_call)
        if isinstance(ready, ToolOutcome):
            return ready
        limits_s = [limit for limit in (ready.timeout_s, timeout_s) if limit is not None]
        try:
            if limits_s:
                return await self._arun_within(ready, min(limits_s))
            return self._succeeded(ready, await _acall(ready))
        except asyncio.CancelledError as error:
            if is_cancelled():
                _abandon(ready.tool, "the call was cancelled")
                raise
            return self._failed(ready, error)
        except BaseException as error:
            # A `GeneratorExit` closes a coroutine that is no longer awaited.
            if is_ctrl_c(error) or isinstance(error, GeneratorExit):
                raise
            return self._failed(ready, error)

    def _run_within(self, ready: _Ready, timeout_s: float) -> ToolOutcome:
        pool = current_pool()
        future = pool.submit(_call, ready)
        try:
            error = future.exception(timeout_s)
        except TimeoutError:
            return self._timed_out(ready, timeout_s, pool, future)
        except BaseException:
            pool.abandon(future)
            _abandon(ready.tool, "the call was interrupted")
            raise
        if error is not None:
            return self._failed(ready, error)
        return self._succeeded(ready, future.result())

    async def _arun_within(self, ready: _Ready, timeout_s: float) -> ToolOutcome:
        # A task of its own: a tool that swallows its cancellation must not hold the caller.
        task = asyncio.ensure_future(_acall(ready))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        except BaseException:
            cancel_without_waiting(task)
            raise
        if task.done():
            try:
                return self._succeeded(ready, task.result())
            # asyncio has re-raised a KeyboardInterrupt; GeneratorExit would close this coroutine.
            except (KeyboardInterrupt, GeneratorExit) as error:
                return self._failed(ready, error)
        cancel_without_waiting(task)
        return self._timed_out(ready, timeout_s)

    def _prepare(self, tool_call: object) -> _Ready | ToolOutcome:
        if not isinstance(tool_call, Mapping):
            found = type(tool_call).__name__
            return refused("bad_call", None, f"tool_call must be an object, found {found}")
        call = cast("Mapping[str, Any]", tool_call)
        function: object = call.get("function")
        if not isinstance(function, Mapping):
            return refused("bad_call", None, 'tool_call has no "function" object')
        fields = cast("Mapping[str, Any]", function)
        name: object = fields.get("name")
        if not isinstance(name, str) or not name:
            return refused("bad_call", None, 'tool_call has no "function.name"')
        entry = self._entries.get(name)
        if entry is None:
            available = ", ".join(sorted(self.names())) or "(none)"
            message = f"unknown tool {name[:200]!r}, available: {available}"
            return self._refused("unknown_tool", name, message)
        try:
            arguments = parse_arguments(fields.get("arguments"))
            if entry.validate is not None:
                entry.validate(arguments)
        except ArgumentsError as error:
            return self._refused("invalid_arguments", name, f"tool {name!r}: {error}")
        except Exception as error:  # the schema itself cannot be applied
            message = f"tool {name!r}: its schema cannot be applied: {describe_error(error)}"
            return self._refused("tool", name, message)
        timeout_s = getattr(entry.tool, "timeout_s", None)
        return _Ready(
            name, entry.tool, arguments, self.timeout_s if timeout_s is None else timeout_s
        )

    def _succeeded(self, ready: _Ready, result: object) -> ToolOutcome:
        return ToolOutcome(
            text=to_text(result, max_chars=self.max_result_chars),
            tool_name=ready.name,
            value=result,
        )

    def _failed(self, ready: _Ready, error: BaseException) -> ToolOutcome:
        if isinstance(error, ArgumentsError):
            return self._refused("invalid_arguments", ready.name, f"tool {ready.name!r}: {error}")
        message = f"tool {ready.name!r} raised {describe_error(error)}"
        return self._refused("tool", ready.name, message)

    def _timed_out(
        self,
        ready: _Ready,
        timeout_s: float,
        pool: ThreadPool | None = None,
        future: Future[Any] | None = None,
    ) -> ToolOutcome:
        reason = f"no result within {timeout_s:g} s"
        if pool is not None and future is not None:
            if future.cancel():  # never started, so the state of the tool is known
                why = f"all {pool.max_threads} threads were busy and it never started"
                return self._refused("timeout", ready.name, f"tool {ready.name!r}: {reason}: {why}")
            pool.abandon(future)
        value = _abandon(ready.tool, reason)
        return self._refused("timeout", ready.name, f"tool {ready.name!r} gave {reason}", value)

    def _refused(
        self, kind: ToolErrorKind, name: str, message: str, value: Any = None
    ) -> ToolOutcome:
        return refused(kind, name, message, max_chars=self.max_result_chars, value=value)


def _call(ready: _Ready) -> Any:
    call = ready.tool.call_value if isinstance(ready.tool, Tool) else ready.tool
    result = call(ready.name, ready.arguments)
    return result if isinstance(result, str) else finish(result)


async def _acall(ready: _Ready) -> Any:
    if isinstance(ready.tool, Tool):
        return await finish_async(ready.tool.acall_value(ready.name, ready.arguments))
    acall = getattr(ready.tool, "acall", None)
    if acall is None:
        return await finish_async(run_blocking(ready.tool, ready.name, ready.arguments))
    return await finish_async(acall(ready.name, ready.arguments))


def _abandon(tool: Any, reason: str) -> Any:
    abandon = getattr(tool, "abandon", None)
    try:
        return None if abandon is None else abandon(reason)
    except Exception:
        logger.exception("abandon(%r) of %r failed", reason, tool)
        return None


def _entry(tool: Any, name: object) -> _Entry:
    """Check a tool once, so that a call finds nothing wrong with it."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tool name must be a non-empty text, found {name!r}")
    function = _function_of(tool)
    check_limit("timeout_s", getattr(tool, "timeout_s", None), allow_none=True)
    parameters = function.get("parameters")
    return _Entry(tool, compile_schema(parameters, tool_name=name) if parameters else None)


def _name_of(tool: Any) -> str:
    name = _function_of(tool).get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"tool {type(tool).__name__} must have a non-empty tool_info()['function']['name'], "
            f"found {name!r}"
        )
    return name


def _renamed(info: ToolInfo, name: str) -> ToolInfo:
    function = info.get("function", {})
    if function.get("name") == name:
        return info
    return {**info, "function": {**function, "name": name}}


def _function_of(tool: Any) -> Mapping[str, Any]:
    if isinstance(tool, type) or not callable(tool) or not hasattr(tool, "tool_info"):
        raise ValueError(
            f"{tool!r} is no tool, for it has no tool_info() or cannot be called: "
            "wrap a plain function in FunctionTool, pass an object and not its class"
        )
    info: Any = cast("Any", tool).tool_info()
    function: Any = cast("Any", info).get("function") if isinstance(info, Mapping) else None
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}
