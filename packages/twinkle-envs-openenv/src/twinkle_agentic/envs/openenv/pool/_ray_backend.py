"""Workers as Ray actors, one per shard, restarted by Ray when their process or node dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import threading
from collections.abc import Generator, Mapping
from typing import Any

from twinkle_agentic.envs.errors import EnvTimeoutError, PoolError, WorkerLostError
from twinkle_agentic.envs.openenv.pool._init_ray import import_ray, init_ray
from twinkle_agentic.envs.openenv.pool._shared_ray import (
    describe_installation,
    join_ray,
    leave_ray,
)
from twinkle_agentic.envs.openenv.pool._worker import PoolWorker

logger = logging.getLogger(__name__)

__all__ = ["RayBackend", "WorkerDeadError"]

_PING_TIMEOUT_S = 5.0
_SPARE_THREADS = 16
_CONTROL = "pool-control"
_CONTROL_GROUP = {_CONTROL: 2}
_CONTROL_METHODS = frozenset({"stats", "close"})
_RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "label_selector")
_ACTOR_OPTIONS: dict[str, Any] = {
    "max_restarts": -1,
    "max_task_retries": 0,  # a step must not run twice
    "scheduling_strategy": "SPREAD",
    "enable_task_events": False,  # a tenth of the cost of a call, for a dashboard nobody opens
}


class WorkerDeadError(WorkerLostError):
    """The worker is dead, and no restart will follow."""

    retryable = False


class RayWorker(PoolWorker):
    """A worker with a process of its own."""

    def __init__(self, start: int, end: int, spec: bytes, slot_threads: bool | None) -> None:
        super().__init__(start, end, spec, slot_threads)
        # Looking for cycles among all that Ray and the environment's module hold takes an instant
        # step longer than all else: what is there by now is not looked at again.
        gc.freeze()


class RayBackend:
    """The actors of one pool.

    Args:
        shards: The slots of each worker.
        spec: Pickled `(env_factory, env_kwargs)`.
        slot_threads: Whether each slot has a thread of its own; else all of a worker share one.
        num_cpus: Of each worker.
        worker_options: Ray actor options, which win over all others.
        ray_options: Of `ray.init`, where this process has not initialised Ray yet.
    """

    def __init__(
        self,
        shards: list[range],
        spec: bytes,
        *,
        slot_threads: bool | None,
        num_cpus: float,
        worker_options: Mapping[str, Any],
        ray_options: Mapping[str, Any],
    ) -> None:
        self._ray = import_ray()
        self._errors: Any = importlib.import_module("ray.exceptions")
        self.shards = shards
        self._worker_options = worker_options
        cpus_needed = num_cpus * len(shards)
        join_ray(self, self._ray, lambda: init_ray(self._ray, cpus_needed, ray_options))
        groups: Mapping[str, int] = worker_options.get("concurrency_groups") or {}
        options: dict[str, Any] = {
            **_ACTOR_OPTIONS,
            "num_cpus": num_cpus,
            **worker_options,
            "concurrency_groups": {**groups, **_CONTROL_GROUP},
        }
        self._options = options
        self._actors: list[Any] = []
        self._recycling: set[int] = set()
        self._lock = threading.Lock()
        try:
            for shard in shards:
                # A thread for the call of each slot, and for one more behind it where the caller
                # of the first was interrupted; a batch takes a single one.
                concurrency = {"max_concurrency": 2 * len(shard) + _SPARE_THREADS}
                actor_class = self._ray.remote(**{**concurrency, **options})(RayWorker)
                self._actors.append(actor_class.remote(shard.start, shard.stop, spec, slot_threads))
        except Exception as error:
            self.shut_down()
            raise PoolError(
                f"Ray refused the workers with the options {options!r}: {error}"
            ) from error

    def send(self, worker: int, requests: bytes) -> Any:
        """Send calls to a worker; returns what `receive` takes.

        Raises:
            PoolError: Ray itself is not running any more.
        """
        return self._submitted(worker, "run", requests)

    def receive(self, worker: int, pending: Any, timeout_s: float) -> bytes:
        """Wait for the replies.

        Raises:
            EnvTimeoutError: No answer within `timeout_s`.
            WorkerLostError: The process or node of the worker died with the calls in flight.
            WorkerDeadError: And it will not come back.
        """
        with self._typed_errors(worker, "run", timeout_s):
            return self._ray.get(pending, timeout=timeout_s)

    async def acall(self, worker: int, method: str, argument: Any, timeout_s: float) -> Any:
        """Call a method of one worker and await its answer; raises as `send` and `receive`."""
        with self._typed_errors(worker, method, timeout_s):
            async with asyncio.timeout(timeout_s):
                return await self._submitted(worker, method, argument)

    def describe_room(self) -> str:
        """Say what the cluster has free and the workers want, for an error message."""
        free: dict[str, float] = self._ray.available_resources()
        asked = {name: self._options[name] for name in _RESOURCES if name in self._options}
        return f"the cluster has {free.get('CPU', 0):g} CPUs free, and each worker asks for {asked}"

    def describe_installation(self) -> str:
        """Say how the `twinkle_agentic` of the workers differs from this one, if it does."""
        return describe_installation(self._ray, self._worker_options)

    def recycle(self, worker: int) -> None:
        """Restart a worker that answers nothing: native code may hold the interpreter for ever."""
        with self._lock:
            if worker in self._recycling:
                return
            self._recycling.add(worker)
        threading.Thread(
            target=self._recycle, args=(worker,), name=f"pool-recycle-{worker}", daemon=True
        ).start()

    def shut_down(self) -> None:
        """Kill the actors, and Ray where a pool started it and no other pool uses it."""
        if self._ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(Exception):  # it may be dead already
                    self._ray.kill(actor)
        self._actors = []
        leave_ray(self, self._ray)

    def _submitted(self, worker: int, method: str, argument: Any) -> Any:
        # A `remote` call without a running Ray would quietly start a new one.
        if not self._actors or not self._ray.is_initialized():
            raise PoolError("Ray was shut down under the pool: make a new pool after ray.init()")
        bound = getattr(self._actors[worker], method)
        if method in _CONTROL_METHODS:  # they get through while every slot is busy
            bound = bound.options(concurrency_group=_CONTROL)
        return bound.remote() if argument is None else bound.remote(argument)

    @contextlib.contextmanager
    def _typed_errors(self, worker: int, method: str, timeout_s: float) -> Generator[None]:
        try:
            yield
        except (self._errors.GetTimeoutError, TimeoutError):
            raise EnvTimeoutError(
                f"worker {worker} gave no answer to {method} within {round(timeout_s, 1):g} s"
            ) from None
        except self._errors.RayTaskError as error:
            raise PoolError(f"worker {worker} failed in {method}: {error}") from error
        except self._errors.ActorUnavailableError as error:
            raise WorkerLostError(_lost(worker, "is restarting", error)) from error
        except self._errors.ActorDiedError as error:
            raise WorkerDeadError(_lost(worker, "is dead", error)) from error
        except self._errors.RayError as error:
            raise WorkerLostError(_lost(worker, "is lost", error)) from error

    def _recycle(self, worker: int) -> None:
        try:
            with self._typed_errors(worker, "stats", _PING_TIMEOUT_S):
                self._ray.get(self._submitted(worker, "stats", None), timeout=_PING_TIMEOUT_S)
        except EnvTimeoutError:
            logger.warning("worker %d answers nothing: its process is replaced", worker)
            with contextlib.suppress(Exception):  # closed meanwhile
                self._ray.kill(self._actors[worker], no_restart=False)
        except Exception as error:  # it is being restarted already, or the pool is closed
            logger.info("worker %d is not recycled: %s", worker, error)
        finally:
            with self._lock:
                self._recycling.discard(worker)


def _lost(worker: int, state: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return f"the process of worker {worker} {state}, and the episodes it held are lost ({reason})"
