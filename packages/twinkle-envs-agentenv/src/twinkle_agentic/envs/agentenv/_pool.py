"""Warm sandboxes: started and set up before an episode asks for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from twinkle_agentic._aio.threads import ThreadPool
from twinkle_agentic.envs.agentenv._config import SandboxSpec
from twinkle_agentic.envs.errors import PoolError

if TYPE_CHECKING:
    from twinkle_agentic.envs.agentenv._env import AgentEnv
    from twinkle_agentic.envs.agentenv._handle import SandboxHandle

logger = logging.getLogger(__name__)

_CLOSE_S = 30.0  # `close` waits this long for sandboxes that are being started
_IDLE_SHARE = 0.5  # of a sandbox's idle time that it may wait here before it is replaced


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
class _WarmQueue:
    """The sandboxes of one spec that wait, with the time each began to."""

    spec: SandboxSpec
    ready: deque[tuple[float, SandboxHandle]] = field(
        default_factory=lambda: deque[tuple[float, "SandboxHandle"]]()
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
        max_kinds: Kinds kept ready at once (>= 1); the least recently used one is evicted.

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
        self._changed = threading.Condition()
        self._queues: list[_WarmQueue] = []  # the least recently used one first
        self._threads = ThreadPool(max_threads=max(8, size))
        self._stats = PoolStats()
        self._closed = False

    def acquire(self, spec: SandboxSpec) -> SandboxHandle:
        """Hand over a ready sandbox, or start one where none is ready.

        Raises:
            PoolError: The pool is closed.
            SandboxError: None could be started (as `AgentEnv.reset`).
        """
        from twinkle_agentic.envs.agentenv._create import start_sandbox

        while (waiting := self._pop(spec)) is not None:
            since, handle = waiting
            if not _is_usable(handle, since):
                with self._changed:
                    self._stats.discarded += 1
                handle.kill()
                continue
            try:
                self._restock(spec)
            except PoolError:  # closed meanwhile
                handle.kill()
                raise
            with self._changed:
                self._stats.hits += 1
            return handle
        self._restock(spec)
        with self._changed:
            self._stats.misses += 1
        return start_sandbox(spec)

    def prefill(self, env: AgentEnv, *, timeout_s: float = 120.0) -> int:
        """Start sandboxes for an env's kind until `size` are ready.

        Returns:
            How many are ready; fewer than `size` where starts failed or `timeout_s` passed.

        Raises:
            PoolError: The pool is closed.
        """
        failures = self._stats.failures
        queue = self._restock(env.spec)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    len(queue.ready) >= self.size or self._stats.failures > failures or self._closed
                ),
                timeout=timeout_s,
            )
            return len(queue.ready)

    def stats(self) -> PoolStats:
        """Return a copy of the counters."""
        with self._changed:
            return replace(
                self._stats,
                warm=sum(len(queue.ready) for queue in self._queues),
                starting=sum(queue.starting for queue in self._queues),
            )

    def close(self) -> None:
        """Kill the sandboxes that wait, those still starting too; calling it again does nothing."""
        deadline = time.monotonic() + _CLOSE_S
        with self._changed:
            self._closed = True
            handles = [handle for queue in self._queues for _, handle in queue.ready]
            for queue in self._queues:
                queue.ready.clear()
            self._changed.notify_all()
        kills = [self._threads.submit(handle.kill) for handle in handles]
        with self._changed:
            self._changed.wait_for(
                lambda: not any(queue.starting for queue in self._queues),
                timeout=_CLOSE_S,
            )
        for kill in kills:
            kill.exception(timeout=max(0.1, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _pop(self, spec: SandboxSpec) -> tuple[float, SandboxHandle] | None:
        with self._changed:
            self._check_open()
            queue = self._queue_of(spec)
            return queue.ready.popleft() if queue.ready else None

    def _restock(self, spec: SandboxSpec) -> _WarmQueue:
        """Start what is missing of a kind, and evict the least recently used of too many kinds."""
        evicted: list[SandboxHandle] = []
        with self._changed:
            self._check_open()
            queue = self._queue_of(spec)
            if queue in self._queues:
                self._queues.remove(queue)
            self._queues.append(queue)
            while len(self._queues) > self.max_kinds:
                evicted += [handle for _, handle in self._queues.pop(0).ready]
            missing = max(0, self.size - len(queue.ready) - queue.starting)
            queue.starting += missing
        for handle in evicted:
            self._threads.submit(handle.kill)
        for _ in range(missing):
            self._threads.submit(self._start_one, queue)
        return queue

    def _start_one(self, queue: _WarmQueue) -> None:
        from twinkle_agentic.envs.agentenv._create import start_sandbox

        handle: SandboxHandle | None = None
        try:
            if not self._closed:
                handle = start_sandbox(queue.spec)
        except Exception as error:
            logger.warning("a warm sandbox could not be started: %s", error)
        with self._changed:
            wanted = not self._closed and queue in self._queues
            if handle is not None and wanted:
                queue.ready.append((time.monotonic(), handle))
            elif wanted:
                self._stats.failures += 1
        if handle is not None and not wanted:
            handle.kill()
        with self._changed:  # only now: `close` waits until none is left
            queue.starting -= 1
            self._changed.notify_all()

    def _queue_of(self, spec: SandboxSpec) -> _WarmQueue:
        return next((queue for queue in self._queues if queue.spec == spec), _WarmQueue(spec))

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("this SandboxPool is closed: make a new one")


def _is_usable(handle: SandboxHandle, since: float) -> bool:
    if time.monotonic() - since > handle.spec.sandbox_timeout_s * _IDLE_SHARE:
        return False
    try:
        running = handle.sandbox.is_running(
            request_timeout=min(10.0, handle.spec.connection.request_timeout)
        )
    except Exception:
        return False
    return running and handle.renew() is None
