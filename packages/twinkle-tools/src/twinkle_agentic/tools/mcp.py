"""Tools of a Model Context Protocol server.

`McpServer` is one session with one server, which it reaches by URL (streamable HTTP) or starts as a
process (standard input and output). `ToolManager.from_mcp` makes a manager of its tools.

Needs the extra: `pip install "twinkle-tools[mcp]"`. Source: Model Context Protocol, revision
2025-06-18, by the official `mcp` package.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

try:
    import anyio
    import httpx
    import mcp
    from mcp import types as wire
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared.exceptions import McpError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"twinkle_agentic.tools.mcp needs the `mcp` package ({error}): "
        'run `pip install "twinkle-tools[mcp]"`',
        name=error.name,
    ) from error

from twinkle_agentic._aio.limits import check_limit
from twinkle_agentic._aio.loop import background_loop, run_sync
from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["McpLostError", "McpResult", "McpServer", "McpTool", "McpToolError"]

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 10.0  # a server process that does not end by then is killed by the transport
_MAX_PAGES = 100  # of the listing of tools
_REQUEST_TIMEOUT = 408  # the code the `mcp` package gives a request without an answer in time


class McpToolError(RuntimeError):
    """The server ran the tool and says that it failed; the text is the server's."""


class McpLostError(ConnectionError):
    """There is no session with the server: it could not be reached, or it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpResult:
    """What a tool answered.

    Attributes:
        text: Its text parts, one line break between two; an image or a sound is named in its place.
        images: Its images as `(media type, bytes)`.
        structured: Its structured content, where it gave any.
        failed: The server says that the tool failed.
    """

    text: str
    images: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    structured: dict[str, Any] | None = None
    failed: bool = False


class McpServer:
    """One session with an MCP server.

    Use it as a context manager, or call `start` and `close`; both have async twins. The session
    lives on the background loop of the process, so one object serves any thread and any event loop,
    and calls of several callers run at the same time. Not picklable.

    Args:
        target: The URL of the server's endpoint (`http://host:8000/mcp`), or the command that
            starts it, as a list.
        headers: Sent with each HTTP request, such as `Authorization`.
        env: Environment variables of the started process, besides the few that every process needs.
        cwd: Its working directory.
        call_timeout_s: Seconds for one call.
        connect_timeout_s: Seconds to connect, initialize and list the tools.

    Raises:
        ValueError: A limit is not positive, or `target` is an empty command.

    Example:
        >>> with McpServer(["python", "weather_server.py"]) as server:
        ...     [tool.name for tool in server.tools()]
        ['forecast']
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        call_timeout_s: float = 60.0,
        connect_timeout_s: float = 30.0,
    ) -> None:
        check_limit("call_timeout_s", call_timeout_s)
        check_limit("connect_timeout_s", connect_timeout_s)
        if not target:
            raise ValueError("target is empty: give a URL, or a command as a list")
        self.target = target if isinstance(target, str) else list(target)
        self.call_timeout_s = call_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self._headers = dict(headers or {})
        self._env = dict(env or {})
        self._cwd = cwd
        self._session: mcp.ClientSession | None = None
        self._tools: list[McpTool] = []
        self._owner: asyncio.Task[None] | None = None  # enters and leaves the session's contexts
        self._stop: asyncio.Event | None = None
        self._connected = False  # the owner waits for `stop`

    def start(self) -> Self:
        """Connect and list the tools; as `astart`, from synchronous code."""
        run_sync(self.astart())
        return self

    async def astart(self) -> Self:
        """Connect and list the tools. Does nothing where the session is open.

        Raises:
            McpLostError: There is no such server, or it ended at once.
            TimeoutError: Not within `connect_timeout_s`.
        """
        await _on_background_loop(self._start())
        return self

    def tools(self) -> list[McpTool]:
        """Return the tools of the server; empty before `start`."""
        return list(self._tools)

    async def acall_tool(self, name: str, arguments: Mapping[str, Any]) -> McpResult:
        """Call one tool.

        Raises:
            McpLostError: The session is not open, or ended before the answer.
            TimeoutError: No answer within `call_timeout_s`; the session lives.
            McpToolError: The server refuses the call (unknown tool, bad arguments).
        """
        return await _on_background_loop(self._call(name, dict(arguments)))

    def close(self) -> None:
        """End the session, and the process it was started with. Idempotent."""
        run_sync(self.aclose(), clean_up_s=_CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        """As `close`."""
        await _on_background_loop(self._close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.astart()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    # On the background loop

    async def _start(self) -> None:
        if self._session is not None:
            return
        await self._close()  # what is left of a session that was lost
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._owner = asyncio.create_task(self._own(ready, self._stop))
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                await ready
        except TimeoutError:
            await self._close()
            raise TimeoutError(
                f"the MCP server {self.target!r} did not answer within "
                f"{self.connect_timeout_s:g} s: is the address right, or raise connect_timeout_s"
            ) from None
        except BaseException:
            await self._close()
            raise

    async def _own(self, ready: asyncio.Future[None], stop: asyncio.Event) -> None:
        """Hold the session open until `stop`; the task that enters its contexts must leave them."""
        try:
            async with AsyncExitStack() as stack:
                session = await self._connect(stack)
                self._tools = [McpTool(self, tool) for tool in await _list_tools(session)]
                self._session = session
                self._connected = True
                ready.set_result(None)
                await stop.wait()
        except Exception as error:
            if not ready.done():
                found = _innermost(error)
                said = f"{type(found).__name__}: {found}" if str(found) else type(found).__name__
                lost = McpLostError(f"no session with the MCP server {self.target!r}: {said}")
                lost.__cause__ = found
                ready.set_exception(lost)
        finally:
            self._session = None
            self._connected = False

    async def _connect(self, stack: AsyncExitStack) -> mcp.ClientSession:
        if isinstance(self.target, str):
            # A stream may be silent for as long as a call may take: the session keeps that limit.
            limits = httpx.Timeout(self.connect_timeout_s, read=2 * self.call_timeout_s)
            client = httpx.AsyncClient(headers=self._headers, timeout=limits)
            await stack.enter_async_context(client)
            transport = streamable_http_client(self.target, http_client=client)
            read, write, _ = await stack.enter_async_context(transport)
        else:
            command, *arguments = self.target
            parameters = mcp.StdioServerParameters(
                command=command, args=arguments, env=self._env, cwd=self._cwd
            )
            read, write = await stack.enter_async_context(stdio_client(parameters))
        session = await stack.enter_async_context(mcp.ClientSession(read, write))
        await session.initialize()
        return session

    async def _call(self, name: str, arguments: dict[str, Any]) -> McpResult:
        if self._session is None:
            raise McpLostError(f"no session with the MCP server {self.target!r}: call start()")
        try:
            # The session's own limit, so that it forgets the request and tells the server.
            limit = timedelta(seconds=self.call_timeout_s)
            return _read(await self._session.call_tool(name, arguments, limit))
        except McpError as error:
            if error.error.code == _REQUEST_TIMEOUT:
                raise self._timed_out(name) from error
            if error.error.code == wire.CONNECTION_CLOSED:
                raise self._lost(name) from error
            raise McpToolError(error.error.message) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError) as error:
            raise self._lost(name) from error

    def _timed_out(self, name: str) -> TimeoutError:
        return TimeoutError(
            f"the MCP tool {name!r} gave no answer within {self.call_timeout_s:g} s"
        )

    def _lost(self, name: str) -> McpLostError:
        self._session = None
        return McpLostError(f"the MCP server {self.target!r} ended during {name!r}")

    async def _close(self) -> None:
        owner, self._owner = self._owner, None
        self._session, self._tools = None, []
        if owner is None:
            return
        if self._stop is not None and self._connected:
            self._stop.set()
        else:  # it looks at `stop` only once it is connected
            owner.cancel()
        done, _ = await asyncio.wait({owner}, timeout=_CLOSE_TIMEOUT_S)
        if not done:
            owner.cancel()
            await asyncio.wait({owner}, timeout=_CLOSE_TIMEOUT_S)
        with contextlib.suppress(BaseException):
            owner.exception()  # of a session that had ended already


class McpTool(Tool):
    """One tool of an MCP server. Made by `McpServer.tools`; lives as long as its session.

    Attributes:
        name: As the server calls it.
    """

    def __init__(self, server: McpServer, tool: wire.Tool) -> None:
        self.server = server
        self.name = tool.name
        self._info: ToolInfo = {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or tool.title or "",
                "parameters": tool.inputSchema,
            },
        }

    def tool_info(self) -> ToolInfo:
        """Return the definition shown to the model, with the server's schema."""
        return self._info

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Call the tool; as `acall`, from synchronous code."""
        return run_sync(self.acall(tool_name, arguments))

    async def acall(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """Call the tool and return its text.

        Raises:
            McpToolError: The tool failed; a `ToolManager` shows the text to the model.
            McpLostError: The session has ended.
            TimeoutError: No answer in time.
        """
        result = await self.server.acall_tool(self.name, arguments)
        if result.failed:
            raise McpToolError(result.text)
        return result.text


async def _on_background_loop(work: Coroutine[Any, Any, T]) -> T:
    loop = background_loop()
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def _list_tools(session: mcp.ClientSession) -> list[wire.Tool]:
    tools: list[wire.Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await session.list_tools(params=wire.PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.nextCursor
        if cursor is None:
            return tools
    raise ValueError(f"the listing of tools has more than {_MAX_PAGES} pages")


def _read(result: wire.CallToolResult) -> McpResult:
    texts: list[str] = []
    images: list[tuple[str, bytes]] = []
    for part in result.content:
        if isinstance(part, wire.TextContent):
            texts.append(part.text)
        elif isinstance(part, wire.ImageContent):
            data = base64.b64decode(part.data)
            images.append((part.mimeType, data))
            texts.append(f"[image {len(images)}: {part.mimeType}, {len(data)} bytes]")
        elif isinstance(part, wire.AudioContent):
            texts.append(f"[audio: {part.mimeType}]")
        elif isinstance(part, wire.ResourceLink):
            texts.append(str(part.uri))
        elif isinstance(part.resource, wire.TextResourceContents):
            texts.append(part.resource.text)
        else:
            texts.append(f"[resource {part.resource.uri}]")
    if not texts and result.structuredContent is not None:
        texts.append(json.dumps(result.structuredContent, ensure_ascii=False))
    return McpResult(
        text="\n".join(texts),
        images=images,
        structured=result.structuredContent,
        failed=result.isError,
    )


def _innermost(error: BaseException) -> BaseException:
    """Return the first real error of the groups that task groups wrap errors in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return error  # pyright: ignore[reportUnknownVariableType]
