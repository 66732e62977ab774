"""The background side of an `OpenEnvClient`: its session, its classes, its tools.

It holds no reference to the client. The coroutines run on the background loop.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.errors import EnvError, SessionClosedError, TwinkleEnvError
from twinkle_agentic.envs.openenv._guide import field_meanings
from twinkle_agentic.envs.openenv._servers import Servers
from twinkle_agentic.envs.openenv.bindings import Binding, TypedBinding, WireBinding
from twinkle_agentic.envs.openenv.client_classes import make_client, resolve_client_class
from twinkle_agentic.envs.openenv.errors import ServerError
from twinkle_agentic.envs.openenv.importing import load_object
from twinkle_agentic.envs.openenv.protocol import MessageType, encode, rpc_result
from twinkle_agentic.envs.openenv.session import Session
from twinkle_agentic.envs.openenv.tool_schemas import (
    action_fields,
    offered_tools,
    schema_of,
    tools_from_mcp,
)
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["Begun", "ServerConnection"]

_LIST_TOOLS_RPC: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
_LIST_TOOLS_STEP: dict[str, Any] = {"type": "list_tools"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A started episode.

    Attributes:
        data: The first answer.
        notes: What the state says of the explicit reset arguments, for `info`.
    """

    data: dict[str, Any]
    notes: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


class ServerConnection:
    """What one client has on one server.

    Attributes:
        offered: The tools the server offers; `None` until it was asked.
        field_meanings: What the fields of an observation mean, as far as it is said.
        binding_note: Why plain dicts are used; empty where a client class is.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        env_name: str | None,
        env_cls: Any,
        action_cls: Any,
        client_kwargs: dict[str, Any],
        message_timeout_s: float,
        capacity_timeout_s: float,
        lists_tools: bool,
        hide_fields: Collection[str],
    ) -> None:
        self.offered: list[ToolInfo] | None = None
        self.field_meanings: dict[str, str] = {}
        self.binding_note = ""
        self._servers = servers
        self._env_name = env_name
        self._env_cls = env_cls
        self._action_cls = action_cls
        self._client_kwargs = client_kwargs
        self._client_settings = {
            "base_url": servers.last.address.http_url,
            "connect_timeout_s": servers.last.connect_timeout_s,
            "message_timeout_s": message_timeout_s,
        }
        self._message_timeout_s = message_timeout_s
        self._capacity_timeout_s = capacity_timeout_s
        self._lists_tools = lists_tools
        self._hide_fields = hide_fields
        self._binding: Binding | None = None
        self._schema: dict[str, Any] | None = None
        self._session: Session | None = None
        self._pid = os.getpid()
        self._fits = False
        self._verified: dict[frozenset[str], dict[str, list[str]]] = {}

    @property
    def binding(self) -> Binding:
        """The conversions in use; known after the first reset."""
        if self._binding is None:
            raise SessionClosedError("no episode has been started: call reset first")
        return self._binding

    @property
    def binding_name(self) -> str | None:
        """The client class in use, as `module:Class`."""
        return None if self._binding is None else self._binding.name

    @property
    def is_open(self) -> bool:
        """Whether the session can take a request."""
        session = self._session
        return session is not None and self._pid == os.getpid() and session.is_open

    async def begin(self, frame: bytes, explicit: Mapping[str, Any]) -> Begun:
        """Start an episode; `explicit` are the reset arguments to verify."""
        await self._bind()
        session = self._own_session()
        data = await session.start(MessageType.RESET, frame, timeout_s=self._message_timeout_s)
        if self._lists_tools:
            await self._offer_tools(session, may_step=True)
        return Begun(data=data, notes=await self._verify(session, explicit))

    async def request(self, kind: MessageType, frame: bytes) -> dict[str, Any]:
        """Send one message of the running episode; from any event loop."""
        session = self._running_session()
        return await session.request(kind, frame, timeout_s=self._message_timeout_s)

    def request_sync(self, kind: MessageType, frame: bytes) -> dict[str, Any]:
        """Send one message of the running episode and block until its answer is there."""
        session = self._running_session()
        return session.request_sync(kind, frame, timeout_s=self._message_timeout_s)

    async def discover_tools(self) -> None:
        """Ask the server for its tools, before any episode."""
        await self._bind()
        await self._offer_tools(self._own_session(), may_step=False)

    @property
    def takes_any_tool_name(self) -> bool:
        """Whether every call is the one action of the server, which lists no tools of its own."""
        return self._binding is not None and not self._binding.takes_mcp_calls

    def misfit(self, data: dict[str, Any]) -> EnvError | None:
        """Return why a class that was found, not asked for, cannot read what the server says."""
        if self._env_cls is not None or self.binding_name is None or self._fits:
            return None
        try:
            self.binding.parse_result(data)
        except EnvError as error:
            return error
        self._fits = True
        return None

    async def use_plain_dicts(self, reason: EnvError) -> None:
        """Give up the client class."""
        self.binding_note = f"plain dicts are used: {reason}"
        await self._bind_plain()
        self.offered = None
        if self._lists_tools:
            await self._offer_tools(self._own_session(), may_step=True)

    async def close(self) -> None:
        """End the session."""
        session = self._session
        if session is not None and self._pid == os.getpid():
            await session.close()

    def drop(self) -> None:
        """End the session from any thread, without waiting."""
        session = self._session
        if session is not None and self._pid == os.getpid():
            session.drop()

    def default_action(self, tool_name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make the fields of an action from a tool call."""
        return action_fields(
            tool_name, arguments, self._schema, takes_mcp_calls=self.binding.takes_mcp_calls
        )

    def _running_session(self) -> Session:
        session = self._session
        if session is None:
            raise SessionClosedError("no episode has been started: call reset first")
        if self._pid != os.getpid():
            raise SessionClosedError(
                "the session belongs to the process this one was forked from: call reset"
            )
        return session

    def _own_session(self) -> Session:
        if self._session is None or self._pid != os.getpid():
            self._session = Session(self._servers, capacity_timeout_s=self._capacity_timeout_s)
            self._pid = os.getpid()
        return self._session

    async def _bind(self) -> None:
        if self._binding is not None:
            return
        found = await resolve_client_class(self._env_name, self._env_cls)
        action_cls: Any = self._action_cls
        if isinstance(action_cls, str):
            action_cls = await run_blocking(load_object, action_cls, argument="action_cls")
        client, note = None, found.note
        if found.client_cls is not None:
            try:
                client = make_client(found.client_cls, self._client_settings, self._client_kwargs)
            except ValueError as error:
                if self._env_cls is not None or self._client_kwargs:  # it was asked for
                    raise
                note = f"plain dicts are used: {error}"
        if client is None:
            self.binding_note = note
            await self._bind_plain(action_cls)
            return
        if action_cls is None:
            action_cls = found.action_cls
        self._schema = schema_of(action_cls)
        self.field_meanings = field_meanings(schema_of(found.observation_cls))
        self._binding = TypedBinding(client, action_cls)

    async def _bind_plain(self, action_cls: Any = None) -> None:
        schemas = await self._servers.schemas()
        self._schema = schemas.action
        self.field_meanings = field_meanings(schemas.observation)
        self._binding = WireBinding(self._schema, action_cls)

    async def _offer_tools(self, session: Session, *, may_step: bool) -> None:
        if self.binding.takes_mcp_calls:
            self.offered = await self._list_mcp_tools(session, may_step=may_step)
        elif self.offered is None:
            self.offered = offered_tools(
                self._schema, env_name=self._env_name, hide=self._hide_fields
            )

    async def _list_mcp_tools(self, session: Session, *, may_step: bool) -> list[ToolInfo]:
        # The JSON-RPC listing is no step of the episode; environments without an MCP server of
        # their own answer only the other.
        timeout_s = self._message_timeout_s
        frame = encode(MessageType.MCP, _LIST_TOOLS_RPC)
        # With an episode running it must be asked in its session: a new one knows of no reset.
        ask = session.request if may_step else session.start
        try:
            answer = await ask(MessageType.MCP, frame, timeout_s=timeout_s)
            listing = _listed(rpc_result(answer))
        except EnvError as error:
            if isinstance(error, ServerError) and not error.session_lives:
                raise
            listing = None
        if listing is None and may_step:
            frame = encode(MessageType.STEP, _LIST_TOOLS_STEP)
            answer = await session.request(MessageType.STEP, frame, timeout_s=timeout_s)
            listing = _listed(answer.get("observation"))
        if listing is None:
            url = self._servers.last.address.http_url
            raise EnvError(
                f"the server on {url} takes MCP tool calls and does not list its tools"
                + ("" if may_step else ": call reset before tools()")
            )
        return tools_from_mcp(listing)

    async def _verify(self, session: Session, explicit: Mapping[str, Any]) -> dict[str, list[str]]:
        """Compare reset arguments with the state: a server drops what `reset` does not take.

        Returns:
            `reset_ignored`: the state shows another `episode_id`; `reset_unverified`: it does not
            show these at all. Neither proves that the environment did not take the argument.
        """
        if not explicit:
            return {}
        names = frozenset(explicit)
        if names in self._verified:  # what an environment takes does not change
            return self._verified[names]
        state: dict[str, Any] = {}
        try:
            state = await session.request(
                MessageType.STATE,
                encode(MessageType.STATE, None),
                timeout_s=self._message_timeout_s,
            )
        except TwinkleEnvError:
            if not session.is_open:
                raise
        ignored: list[str] = []
        asked, found = explicit.get("episode_id"), state.get("episode_id")
        if asked is not None and found is not None and str(found) != str(asked):
            ignored.append("episode_id")
        unverified = sorted(
            name
            for name, value in explicit.items()
            if name not in ignored and (name not in state or state[name] != value)
        )
        notes = {"reset_ignored": ignored, "reset_unverified": unverified}
        self._verified[names] = notes
        return notes


def _listed(answer: Any) -> list[Any] | None:
    if not isinstance(answer, Mapping):
        return None
    tools = cast("Mapping[str, Any]", answer).get("tools")
    return cast("list[Any]", tools) if isinstance(tools, list) else None
