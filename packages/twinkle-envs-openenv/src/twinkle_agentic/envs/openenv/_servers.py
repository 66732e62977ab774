"""The servers of one client: which of them takes the next session.

With one server there is nothing to choose and nothing is asked. With several, the one with the most
room is taken, as its `GET /capacity` says; among servers that do not say, the one on which this
process has the fewest sessions. A server that cannot be reached is passed over for a while. All
clients of the process share what is known of a server. Everything here runs on the background loop.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvTimeoutError,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv._config import ConnectionConfig, ServerAddress
from twinkle_agentic.envs.openenv._server_info import ServerSchemas, fetch_capacity, fetch_schemas
from twinkle_agentic.envs.openenv._websocket import WebSocket, open_websocket

__all__ = ["Servers"]

_FRESH_S = 1.0
_SILENT_S = 60.0  # until a server that has no `/capacity` is asked again
_DOWN_S = 5.0
_QUEUE_S = 2.0  # then another server may have room
_WAIT_HEADER = "X-OpenEnv-Queue-Timeout-S"


@dataclass(eq=False, slots=True)
class _Load:
    """What this process knows of a server.

    Attributes:
        websockets: The sessions of this process on it.
        free: Sessions it had room for when it was asked; `None` where it does not say.
        taken: Sessions of this process since then.
        ask_after: When to ask again, on the clock of the loop.
        full_until: Until when it counts as full, because it refused a session.
        down_until: When to try again.
    """

    websockets: list[WebSocket] = field(default_factory=list[WebSocket])
    free: int | None = None
    taken: int = 0
    ask_after: float = 0.0
    full_until: float = 0.0
    down_until: float = 0.0
    asking: asyncio.Task[None] | None = None

    def num_open(self) -> int:
        self.websockets = [websocket for websocket in self.websockets if websocket.is_open]
        return len(self.websockets)


class Servers:
    """The servers of one client.

    Args:
        addresses: Of each.
        config: How to reach them.

    Attributes:
        last: The server of the last connection, or the first.
    """

    def __init__(self, addresses: Sequence[ServerAddress], config: ConnectionConfig) -> None:
        self._addresses = list(addresses)
        self._config = config
        self.last = self._addresses[0]

    @property
    def where(self) -> str:
        """Their addresses, for messages."""
        return ", ".join(address.http_url for address in self._addresses)

    async def open(self, *, wait_s: float) -> WebSocket:
        """Connect to the server that has the most room, or to the next one where that fails.

        Args:
            wait_s: Seconds to wait in the queue of a server that has one.

        Raises:
            TwinkleEnvError: The last failure, when no server can be reached.
        """
        if len(self._addresses) == 1:
            return await self._connect(self.last, wait_s)
        await asyncio.gather(*map(self._refresh, self._addresses))
        failures: list[TwinkleEnvError] = []
        for address in sorted(self._addresses, key=_rank):
            try:
                return await self._connect(address, min(wait_s, _QUEUE_S))
            except CapacityError as error:
                self.refused()
                failures.insert(0, error)  # waiting may help
            except (SessionClosedError, EnvTimeoutError) as error:
                _load_of(address).down_until = asyncio.get_running_loop().time() + _DOWN_S
                failures.append(error)
        raise failures[0]

    def refused(self) -> None:
        """Take note that the server of the last connection has no room."""
        _load_of(self.last).full_until = asyncio.get_running_loop().time() + _FRESH_S

    async def schemas(self) -> ServerSchemas:
        """Return the JSON Schemas of action and observation, from the first server that has them.

        Raises:
            TwinkleEnvError: The last failure, when none does.
        """
        failure: Exception | None = None
        found: ServerSchemas | None = None
        for address in sorted(self._addresses, key=_rank):
            try:
                found = await fetch_schemas(address, self._config)
            except (SessionClosedError, EnvTimeoutError) as error:
                failure = error
            else:
                if not found.error:
                    break
        if found is None:
            assert failure is not None
            raise failure
        return found

    async def _connect(self, address: ServerAddress, wait_s: float) -> WebSocket:
        headers = {**(self._config.headers or {}), _WAIT_HEADER: f"{max(0.0, wait_s):g}"}
        load = _load_of(address)
        self.last = address
        load.taken += 1
        try:
            websocket = await open_websocket(address, self._config, headers)
        except BaseException:
            load.taken -= 1
            raise
        load.down_until = 0.0
        load.websockets.append(websocket)
        return websocket

    async def _refresh(self, address: ServerAddress) -> None:
        """Ask a server for its room, unless that was done a moment ago; one question at a time."""
        load = _load_of(address)
        if asyncio.get_running_loop().time() < max(load.ask_after, load.down_until):
            return
        if load.asking is None or load.asking.done():
            load.asking = asyncio.ensure_future(self._ask(address, load))
        await asyncio.shield(load.asking)

    async def _ask(self, address: ServerAddress, load: _Load) -> None:
        loop = asyncio.get_running_loop()
        taken = load.taken
        try:
            free = await fetch_capacity(address, self._config)
        except (SessionClosedError, EnvTimeoutError):
            load.down_until = loop.time() + _DOWN_S
            return
        load.free = free
        load.taken -= taken  # those that were on their way meanwhile may not be in its count
        load.ask_after = loop.time() + (_SILENT_S if free is None else _FRESH_S)


def _rank(address: ServerAddress) -> tuple[bool, bool, int, int, float]:
    """Sort key: what is down last, what is full before it, then by room, then by open sessions."""
    load = _load_of(address)
    now = asyncio.get_running_loop().time()
    room = 0 if load.free is None else load.free - load.taken
    full = load.full_until > now or (load.free is not None and room <= 0)
    # Chance last: many processes that start together do not all begin with the same server.
    return load.down_until > now, full, -room, load.num_open(), random.random()


def _load_of(address: ServerAddress) -> _Load:
    return _loads.setdefault(address.http_url, _Load())


_loads: dict[str, _Load] = {}

os.register_at_fork(after_in_child=_loads.clear)  # the tasks are of the parent's loop
