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
from dataclasses import dataclass, field, replace

from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvTimeoutError,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv.link import Link
from twinkle_agentic.envs.openenv.link_settings import LinkSettings
from twinkle_agentic.envs.openenv.server_schema import ServerSchemas, fetch_capacity, fetch_schemas

__all__ = ["Servers"]

_FRESH_S = 1.0
_SILENT_S = 60.0  # until a server that has no `/capacity` is asked again
_DOWN_S = 5.0
_QUEUE_S = 2.0  # then another server may have room
_WAIT_HEADER = "X-OpenEnv-Queue-Timeout-S"


@dataclass(eq=False, slots=True)
class _Server:
    """What this process knows of a server.

    Attributes:
        links: The sessions of this process on it.
        free: Sessions it had room for when it was asked; `None` where it does not say.
        taken: Sessions of this process since then.
        ask_after: When to ask again, on the clock of the loop.
        full_until: Until when it counts as full, because it refused a session.
        down_until: When to try again.
    """

    links: list[Link] = field(default_factory=list[Link])
    free: int | None = None
    taken: int = 0
    ask_after: float = 0.0
    full_until: float = 0.0
    down_until: float = 0.0
    asking: asyncio.Task[None] | None = None

    def num_open(self) -> int:
        self.links = [link for link in self.links if link.failure is None]
        return len(self.links)


class Servers:
    """The servers of one client.

    Args:
        choices: How to reach each; they differ in the address alone.
    """

    def __init__(self, choices: Sequence[LinkSettings]) -> None:
        self._choices = list(choices)
        self._last = self._choices[0]

    @property
    def where(self) -> str:
        """Their addresses, for messages."""
        return ", ".join(choice.address.http_url for choice in self._choices)

    @property
    def last(self) -> LinkSettings:
        """The server of the last connection, or the first."""
        return self._last

    async def open(self, *, wait_s: float) -> Link:
        """Connect to the server that has the most room, or to the next one where that fails.

        Args:
            wait_s: Seconds to wait in the queue of a server that has one.

        Raises:
            TwinkleEnvError: The last failure, when no server can be reached.
        """
        if len(self._choices) == 1:
            return await self._connect(self._last, wait_s)
        await asyncio.gather(*(_refresh(choice) for choice in self._choices))
        failures: list[TwinkleEnvError] = []
        for choice in sorted(self._choices, key=_rank):
            try:
                return await self._connect(choice, min(wait_s, _QUEUE_S))
            except CapacityError as error:
                self.refused()
                failures.insert(0, error)  # waiting may help
            except (SessionClosedError, EnvTimeoutError) as error:
                _known(choice).down_until = asyncio.get_running_loop().time() + _DOWN_S
                failures.append(error)
        raise failures[0]

    def refused(self) -> None:
        """Take note that the server of the last connection has no room."""
        _known(self._last).full_until = asyncio.get_running_loop().time() + _FRESH_S

    async def schemas(self) -> ServerSchemas:
        """Return the JSON Schemas of action and observation, from the first server that answers.

        Raises:
            TwinkleEnvError: The last failure, when none does.
        """
        failure: Exception | None = None
        for choice in sorted(self._choices, key=_rank):
            try:
                return await fetch_schemas(choice)
            except (SessionClosedError, EnvTimeoutError) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _connect(self, choice: LinkSettings, wait_s: float) -> Link:
        headers = {**(choice.headers or {}), _WAIT_HEADER: f"{max(0.0, wait_s):g}"}
        server = _known(choice)
        self._last = choice
        server.taken += 1
        try:
            link = await Link.open(replace(choice, headers=headers))
        except BaseException:
            server.taken -= 1
            raise
        server.down_until = 0.0
        server.links.append(link)
        return link


def _rank(choice: LinkSettings) -> tuple[bool, bool, int, int, float]:
    """Sort key: what is down last, what is full before it, then by room, then by open sessions."""
    server = _known(choice)
    now = asyncio.get_running_loop().time()
    room = 0 if server.free is None else server.free - server.taken
    full = server.full_until > now or (server.free is not None and room <= 0)
    # Chance last: many processes that start together do not all begin with the same server.
    return server.down_until > now, full, -room, server.num_open(), random.random()


async def _refresh(choice: LinkSettings) -> None:
    """Ask a server for its room, unless that was done a moment ago; one question at a time."""
    server = _known(choice)
    now = asyncio.get_running_loop().time()
    if now < max(server.ask_after, server.down_until):
        return
    if server.asking is None or server.asking.done():
        server.asking = asyncio.ensure_future(_ask(choice, server))
    await asyncio.shield(server.asking)


async def _ask(choice: LinkSettings, server: _Server) -> None:
    loop = asyncio.get_running_loop()
    taken = server.taken
    try:
        free = await fetch_capacity(choice)
    except (SessionClosedError, EnvTimeoutError):
        server.down_until = loop.time() + _DOWN_S
        return
    server.free = free
    server.taken -= taken  # those that were on their way meanwhile may not be in its count
    server.ask_after = loop.time() + (_SILENT_S if free is None else _FRESH_S)


def _known(choice: LinkSettings) -> _Server:
    return _servers.setdefault(choice.address.http_url, _Server())


_servers: dict[str, _Server] = {}


def _forget_after_fork() -> None:
    # The links are the parent's, and so is the loop of the tasks.
    _inherited.append(dict(_servers))
    _servers.clear()


_inherited: list[dict[str, _Server]] = []

os.register_at_fork(after_in_child=_forget_after_fork)
