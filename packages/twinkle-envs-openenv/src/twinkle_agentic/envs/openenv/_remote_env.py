"""What the environment on a server takes and says: its classes or schemas, and its tools."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.errors import EnvError, SessionClosedError, TwinkleEnvError
from twinkle_agentic.envs.openenv._bindings import Binding, TypedBinding, WireBinding
from twinkle_agentic.envs.openenv._client_classes import make_client, resolve_client_class
from twinkle_agentic.envs.openenv._config import ConnectionConfig
from twinkle_agentic.envs.openenv._guide import field_meanings
from twinkle_agentic.envs.openenv._importing import load_object
from twinkle_agentic.envs.openenv._protocol import MessageType, encode, rpc_result
from twinkle_agentic.envs.openenv._servers import Servers
from twinkle_agentic.envs.openenv._session import Session
from twinkle_agentic.envs.openenv._tool_schemas import (
    action_fields,
    action_properties,
    misfit,
    offered_tools,
    schema_of,
    tool_from_action,
    tools_from_mcp,
)
from twinkle_agentic.envs.openenv.errors import ActionRefusedError, ServerError
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["RemoteEnv"]

_LIST_TOOLS_RPC: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
_LIST_TOOLS_STEP: dict[str, Any] = {"type": "list_tools"}


class RemoteEnv:
    """What one client knows of the environment on the servers.

    Attributes:
        tools: What the server offers; `None` until it was asked.
        field_meanings: What the fields of an observation mean, as far as it is said.
        note: Why plain dicts are used; empty where a client class is.
        schema_error: Why the fields of the action are not known; empty where they are, and where
            the server has no endpoint to ask for them.
    """

    def __init__(
        self,
        servers: Servers,
        config: ConnectionConfig,
        *,
        env_name: str | None,
        env_cls: Any,
        action_cls: Any,
        client_kwargs: Mapping[str, Any],
        hide_fields: Collection[str],
    ) -> None:
        self.tools: list[ToolInfo] | None = None
        self.field_meanings: dict[str, str] = {}
        self.note = ""
        self.schema_error = ""
        self._servers = servers
        self._config = config
        self._env_name = env_name
        self._env_cls = env_cls
        self._action_cls = action_cls
        self._client_kwargs = dict(client_kwargs)
        self._hide_fields = hide_fields
        self._binding: Binding | None = None
        self._schema: dict[str, Any] | None = None
        self._fits = env_cls is not None  # one that was asked for is used in any case
        self._verified: dict[frozenset[str], dict[str, list[str]]] = {}

    @property
    def binding(self) -> Binding:
        """The conversions in use; known after the first reset."""
        if self._binding is None:
            raise SessionClosedError("no episode has been started: call reset first")
        return self._binding

    @property
    def takes_any_tool_name(self) -> bool:
        """Whether every call is the one action of the server, which lists no tools of its own."""
        return self._binding is not None and not self._binding.takes_mcp_calls

    def default_action(self, tool_name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make the fields of an action from a tool call."""
        return action_fields(
            tool_name, arguments, self._schema, takes_mcp_calls=self.binding.takes_mcp_calls
        )

    def explained(self, error: ActionRefusedError) -> ActionRefusedError:
        """Say what a server refused in the words of a check here, with the fields there are."""
        return misfit(error.errors, action_properties(self._schema)) if error.errors else error

    async def bind(self) -> None:
        """Find the client class, or ask the server for its schemas; once."""
        if self._binding is not None:
            return
        found = await resolve_client_class(self._env_name, self._env_cls)
        action_cls: Any = self._action_cls
        if isinstance(action_cls, str):
            action_cls = await run_blocking(load_object, action_cls, argument="action_cls")
        client, note = None, found.note
        if found.client_cls is not None:
            settings = {
                "base_url": self._servers.last.http_url,
                "connect_timeout_s": self._config.connect_timeout_s,
                "message_timeout_s": self._config.message_timeout_s,
            }
            try:
                client = make_client(found.client_cls, settings, self._client_kwargs)
            except ValueError as error:
                if self._env_cls is not None or self._client_kwargs:  # it was asked for
                    raise
                note = f"plain dicts are used: {error}"
        if client is None:
            self.note = note
            await self._bind_plain(action_cls)
            return
        if action_cls is None:
            action_cls = found.action_cls
        self._schema = schema_of(action_cls)
        if action_cls is not None and self._schema is None:
            self.schema_error = f"the action class {action_cls!r} has no JSON Schema"
        self.field_meanings = field_meanings(schema_of(found.observation_cls))
        self._binding = TypedBinding(client, action_cls)

    async def check_fit(self, data: dict[str, Any]) -> None:
        """Go over to plain dicts where the class that was found cannot read the first answer."""
        if self._fits or self.binding.name is None:
            return
        try:
            self.binding.parse_result(data)
        except EnvError as error:
            self.note = f"plain dicts are used: {error}"
            await self._bind_plain()
            self.tools = None
        self._fits = True

    async def list_tools(self, session: Session, *, running: bool) -> None:
        """Learn the tools that the server offers; `running` says that the session has an episode.

        Raises:
            EnvError: It takes MCP calls and does not list its tools.
        """
        if not self.binding.takes_mcp_calls:
            if self.tools is None:
                self.tools = (
                    [tool_from_action({}, env_name=self._env_name)]
                    if self.schema_error
                    else offered_tools(
                        self._schema, env_name=self._env_name, hide=self._hide_fields
                    )
                )
            return
        # The JSON-RPC listing is no step of the episode; environments without an MCP server of
        # their own answer only the other.
        frame = encode(MessageType.MCP, _LIST_TOOLS_RPC)
        # With an episode running it must be asked in its session: a new one knows of no reset.
        ask = session.request if running else session.start
        try:
            listing = _listed(rpc_result(await ask(MessageType.MCP, frame)))
        except EnvError as error:
            if isinstance(error, ServerError) and not error.session_lives:
                raise
            listing = None
        if listing is None and running:
            frame = encode(MessageType.STEP, _LIST_TOOLS_STEP)
            listing = _listed((await session.request(MessageType.STEP, frame)).get("observation"))
        if listing is None:
            raise EnvError(
                f"the server on {self._servers.last.http_url} takes MCP tool calls and does not "
                "list its tools" + ("" if running else ": call reset before tools()")
            )
        self.tools = tools_from_mcp(listing)

    async def verify(self, session: Session, explicit: Mapping[str, Any]) -> dict[str, list[str]]:
        """Compare reset arguments with the state: a server drops what `reset` does not take.

        Returns:
            `reset_ignored`: the state shows another `episode_id`; `reset_unverified`: it does not
            show these values. Neither proves that the environment did not take the argument.
        """
        if not explicit:
            return {}
        names = frozenset(explicit)
        if names in self._verified:  # what an environment takes does not change
            return self._verified[names]
        state: dict[str, Any] = {}
        try:
            state = await session.request(MessageType.STATE, encode(MessageType.STATE, None))
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

    async def _bind_plain(self, action_cls: Any = None) -> None:
        schemas = await self._servers.schemas()
        self._schema = schemas.action or schema_of(action_cls)
        self.schema_error = "" if self._schema is not None else schemas.error
        self.field_meanings = field_meanings(schemas.observation)
        self._binding = WireBinding(self._schema, action_cls)


def _listed(answer: Any) -> list[Any] | None:
    if not isinstance(answer, Mapping):
        return None
    tools = cast("Mapping[str, Any]", answer).get("tools")
    return cast("list[Any]", tools) if isinstance(tools, list) else None
