"""The Ray of this process, which several pools may use, and what its nodes have installed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

__all__ = ["describe_installation", "join_ray", "leave_ray"]

_PROBE_TIMEOUT_S = 20.0
_PLACEMENT = ("runtime_env", "resources", "scheduling_strategy", "label_selector")

_lock = threading.Lock()
_users: set[object] = set()
_begun: tuple[str, str] | None = None  # the connection that a pool made


def join_ray(user: object, ray: Any, begin: Callable[[], None]) -> None:
    """Count a user of Ray; `begin` makes the connection where there is none."""
    global _begun
    with _lock:
        if not ray.is_initialized():
            begin()
            _users.clear()
            _begun = _connection(ray)
        _users.add(user)


def leave_ray(user: object, ray: Any) -> None:
    """Count a user out; the last one ends the connection that a pool made. Again does nothing."""
    global _begun
    with _lock:
        if user not in _users:
            return
        _users.discard(user)
        # Somebody may have ended it since, and have made another one.
        if not _users and ray.is_initialized() and _begun == _connection(ray):
            _begun = None
            ray.shutdown()


def describe_installation(ray: Any, worker_options: Mapping[str, Any]) -> str:
    """Say how the `twinkle_agentic` of the workers differs from that of this process.

    Args:
        ray: The module.
        worker_options: Of the actors; they decide on which nodes and in what surroundings to look.

    Returns:
        Text for an error message; empty where they are the same, or where it cannot be told within
        20 s.
    """
    options = {key: worker_options[key] for key in _PLACEMENT if key in worker_options}
    look = _probe()
    try:
        remote = ray.remote(num_cpus=0, max_retries=0, **options)(look)
        theirs: dict[str, str] = ray.get(remote.remote(), timeout=_PROBE_TIMEOUT_S)
    except Exception as error:
        logger.info("what the workers have installed cannot be told: %s", error)
        return ""
    ours = look()
    if theirs == ours:
        return ""
    lacks = "" if theirs["worker"] else ", which has no EnvPool worker"
    return (
        f"the workers import twinkle_agentic from {theirs['package']!r} "
        f"(of {theirs['distributions'] or 'no distribution'}){lacks}; this process has "
        f"{ours['worker']!r} (of {ours['distributions'] or 'no distribution'}): install the "
        "same twinkle-envs-openenv on the nodes of the workers, and nothing there that brings a "
        "twinkle_agentic of its own, "
        'or start a Ray of your own with ray_options={"address": "local"}'
    )


def _connection(ray: Any) -> tuple[str, str]:
    """Tell one connection to a cluster from others."""
    context = ray.get_runtime_context()
    return str(context.get_node_id()), str(context.get_job_id())


def _probe() -> Callable[[], dict[str, str]]:
    """Make the function that looks; nested, so that it travels by value."""

    def look() -> dict[str, str]:
        import importlib.metadata
        import importlib.util

        def file_of(name: str) -> str:
            try:
                spec = importlib.util.find_spec(name)
            except Exception:  # it imports the parents, which may raise anything
                return ""
            if spec is None:
                return ""
            return str(spec.origin or ", ".join(spec.submodule_search_locations or ()))

        owners = importlib.metadata.packages_distributions().get("twinkle_agentic", [])
        versions = [f"{owner} {importlib.metadata.version(owner)}" for owner in set(owners)]
        return {
            "worker": file_of("twinkle_agentic.envs.openenv.pool._worker"),
            "package": file_of("twinkle_agentic"),
            "distributions": ", ".join(sorted(versions)),
        }

    return look


def _forget_after_fork() -> None:
    global _lock, _begun
    _lock, _begun = threading.Lock(), None  # the connection is the parent's
    _users.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
