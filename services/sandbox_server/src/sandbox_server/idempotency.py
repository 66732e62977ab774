"""Do a request once, however often it is sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from sandbox_server.errors import ApiError
from sandbox_server.record import SandboxRecord

_MAX_KEYS = 4096
_LIFETIME_S = 900.0


class _Known(NamedTuple):
    digest: str
    result: asyncio.Future[SandboxRecord]
    at: float


class IdempotencyKeys:
    """The keys of the last quarter of an hour (at most 4,096), and what came of each.

    Args:
        spawn: Runs a coroutine that outlives the request it was made in.
    """

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._spawn = spawn
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def once(
        self, key: str, message: dict[str, Any], create: Callable[[], Awaitable[SandboxRecord]]
    ) -> SandboxRecord:
        """Return what `create` made for this key, now or before. A failure may be tried again.

        Raises:
            ApiError: The key was used for another request (422), or `create` failed.
        """
        digest = hashlib.sha256(json.dumps(message, sort_keys=True).encode()).hexdigest()
        self._forget_old()
        known = self._known.get(key)
        if known is None:
            future: asyncio.Future[SandboxRecord] = asyncio.get_running_loop().create_future()
            known = self._known[key] = _Known(digest, future, time.monotonic())
            # In a task of its own: a client that gives up and asks again finds this sandbox.
            self._spawn(self._run(key, future, create))
        elif known.digest != digest:
            raise ApiError(422, f"Idempotency-Key {key!r} was used for another request")
        return await asyncio.shield(known.result)

    async def _run(
        self,
        key: str,
        future: asyncio.Future[SandboxRecord],
        create: Callable[[], Awaitable[SandboxRecord]],
    ) -> None:
        try:
            future.set_result(await create())
        except BaseException as error:
            self._known.pop(key, None)
            closing = ApiError(503, "the server is closing")
            future.set_exception(error if isinstance(error, Exception) else closing)
            future.exception()  # nobody may be waiting any more
            if not isinstance(error, Exception):
                raise

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _LIFETIME_S
        while self._known:
            known = next(iter(self._known.values()))
            if known.at > oldest and len(self._known) < _MAX_KEYS:
                return
            self._known.popitem(last=False)
