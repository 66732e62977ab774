"""Warm sandboxes: started and set up before an episode asks for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.envs.agentenv.types import SandboxSpec
from twinkle_agentic.envs.errors import PoolError

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv.env import AgentEnv
    from twinkle_agentic.envs.agentenv.lease import Lease

logger = logging.getLogger(__name__)

__all__ = ["PoolStats", "SandboxPool"]

_CLOSE_S = 30.0  # `close` waits this long for sandboxes that are being started
_IDLE_SHARE = 0.5  # of a sandbox's idle time that it may wait here before it is exchanged


@dataclass(slots=True, kw_only=True)
class PoolStats:
    """What a pool has done.

    Attributes:
        warm: Sandboxes that wait now.
        starting: Sandboxes being started now.
        hits: Handed over warm.
        misses: Started on demand.
        discarded: Found dead or too old at hand-over.
        failures: Starts in the background that failed.
    """

    warm: int = 0
    starting: int = 0
    hits: int = 0
    misses: int = 0
    discarded: int = 0
    failures: int = 0


@dataclass(eq=False)
class _Shelf:
    """The sandboxes of one spec."""

    spec: SandboxSpec
    ready: deque[tuple[float, Lease]] = field(
        default_factory=lambda: deque[tuple[float, "Lease"]]()
    )
    starting: int = 0


class SandboxPool:
    """Keeps sandboxes ready per kind: server, template, setup commands and whatever else makes one.

    Envs with the same arguments share the ready ones: `AgentEnv(..., pool=pool)`. A sandbox is
    handed over once and never comes back; another is started in its place. At hand-over it must
    answer, and its idle time starts anew. The label `twinkle-episode` is not set on warm ones.
    Thread-safe; a context manager. Sandboxes that wait are killed by `close` and at the exit of the
    interpreter.

    Args:
        size: Sandboxes kept ready of each kind (>= 1).
        max_kinds: Kinds kept ready at once (>= 1); the one not asked for longest is given up.

    Raises:
        ValueError: An argument is below 1.
    """

    def __init__(self, size: int = 4, *, max_kinds: int = 16) -> None:
        if size < 1 or max_kinds < 1:
            raise ValueError(
                f"size and max_kinds must be at least 1, found {size!r} and {max_kinds!r}"
            )
        self.size = size
        self.max_kinds = max_kinds
        self._lock = threading.Condition()
        self._shelves: dict[str, _Shelf] = {}  # the one asked for longest ago first
        self._threads = ThreadPool(max_threads=max(8, size))
        self._stats = PoolStats()
        self._closed = False

    def acquire(self, spec: SandboxSpec) -> Lease:
        """Hand over a ready sandbox, or start one where none is ready.

        Raises:
            PoolError: The pool is closed.
            SandboxError: None could be started (as `AgentEnv.reset`).
        """
        from twinkle_agentic.envs.agentenv.creating import start_sandbox

        while (entry := self._take(spec)) is not None:
            since, lease = entry
            if self._usable(lease, since):
                try:
                    self._restock(spec)
                except PoolError:  # closed meanwhile
                    lease.kill()
                    raise
                with self._lock:
                    self._stats.hits += 1
                return lease
            with self._lock:
                self._stats.discarded += 1
            lease.kill()
        with self._lock:
            self._stats.misses += 1
        self._restock(spec)
        return start_sandbox(spec)

    def prefill(self, env: AgentEnv, *, timeout_s: float = 120.0) -> int:
        """Start sandboxes for an env's kind until `size` are ready.

        Returns:
            How many are ready; fewer than `size` where starts failed or `timeout_s` passed.

        Raises:
            PoolError: The pool is closed.
        """
        spec = env.spec
        failures = self._stats.failures
        self._restock(spec)
        with self._lock:
            shelf = self._shelves[spec.key()]
            self._lock.wait_for(
                lambda: (
                    len(shelf.ready) >= self.size or self._stats.failures > failures or self._closed
                ),
                timeout=timeout_s,
            )
            return len(shelf.ready)

    def stats(self) -> PoolStats:
        """Return a copy of the counters."""
        with self._lock:
            found = PoolStats(
                hits=self._stats.hits,
                misses=self._stats.misses,
                discarded=self._stats.discarded,
                failures=self._stats.failures,
            )
            for shelf in self._shelves.values():
                found.warm += len(shelf.ready)
                found.starting += shelf.starting
            return found

    def close(self) -> None:
        """Kill the sandboxes that wait, those still starting too; calling it again does nothing."""
        with self._lock:
            self._closed = True
            leases = [lease for shelf in self._shelves.values() for _, lease in shelf.ready]
            for shelf in self._shelves.values():
                shelf.ready.clear()
            self._lock.notify_all()
        futures = [self._threads.submit(lease.kill) for lease in leases]
        deadline = time.monotonic() + _CLOSE_S
        with self._lock:
            self._lock.wait_for(
                lambda: not any(shelf.starting for shelf in self._shelves.values()),
                timeout=_CLOSE_S,
            )
        for future in futures:
            future.exception(timeout=max(0.1, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, spec: SandboxSpec) -> tuple[float, Lease] | None:
        with self._lock:
            self._check_open()
            shelf = self._shelves.get(spec.key())
            return shelf.ready.popleft() if shelf is not None and shelf.ready else None

    def _usable(self, lease: Lease, since: float) -> bool:
        if time.monotonic() - since > lease.spec.sandbox_timeout_s * _IDLE_SHARE:
            return False
        try:
            running = lease.sandbox.is_running(
                request_timeout=min(10.0, lease.spec.connection.request_timeout)
            )
        except Exception:
            return False
        return running and lease.renew() is None

    def _restock(self, spec: SandboxSpec) -> None:
        evicted: list[Lease] = []
        key = spec.key()
        with self._lock:
            self._check_open()
            shelf = self._shelves.pop(key, None) or _Shelf(spec)
            self._shelves[key] = shelf
            while len(self._shelves) > self.max_kinds:
                oldest = next(iter(self._shelves))
                evicted += [lease for _, lease in self._shelves.pop(oldest).ready]
            missing = self.size - len(shelf.ready) - shelf.starting
            shelf.starting += max(0, missing)
        for lease in evicted:
            self._threads.submit(lease.kill)
        for _ in range(missing):
            self._threads.submit(self._start_one, shelf)

    def _start_one(self, shelf: _Shelf) -> None:
        from twinkle_agentic.envs.agentenv.creating import start_sandbox

        lease: Lease | None = None
        try:
            if not self._closed:
                lease = start_sandbox(shelf.spec)
        except Exception as error:
            logger.warning("a warm sandbox could not be started: %s", error)
        with self._lock:
            wanted = not self._closed and shelf in self._shelves.values()
            if lease is not None and wanted:
                shelf.ready.append((time.monotonic(), lease))
            elif lease is None and wanted:
                self._stats.failures += 1
        if lease is not None and not wanted:
            lease.kill()
        with self._lock:  # only now, for `close` waits until none is left
            shelf.starting -= 1
            self._lock.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("this SandboxPool is closed: make a new one")
