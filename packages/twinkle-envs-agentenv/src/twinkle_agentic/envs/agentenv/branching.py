"""Copies of a running sandbox: forks and snapshots."""

from __future__ import annotations

import logging
import math
import time

from e2b import Sandbox

from twinkle_agentic.envs.agentenv import labels
from twinkle_agentic.envs.agentenv.creating import refusal
from twinkle_agentic.envs.agentenv.failures import Failure, Fault, probe_info, read_failure
from twinkle_agentic.envs.agentenv.gate import create_gate
from twinkle_agentic.envs.agentenv.lease import Lease
from twinkle_agentic.envs.agentenv.recovery import check_alive
from twinkle_agentic.envs.agentenv.types import SandboxSpec
from twinkle_agentic.envs.agentenv.waiting import in_flight, pending_creation
from twinkle_agentic.envs.errors import SandboxError

logger = logging.getLogger(__name__)

__all__ = ["delete_snapshot", "fork_lease", "take_snapshot"]

_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 5.0


def fork_lease(lease: Lease, n: int, *, per_request: int) -> list[Lease]:
    """Make `n` copies of a sandbox; all of them or none.

    Those that the server has no room for are asked for again within `spec.capacity_timeout_s`.

    Raises:
        SandboxLostError: The sandbox is gone.
        SandboxUnavailableError: Not all could be made.
    """
    spec = lease.spec
    give_up_at = time.monotonic() + spec.capacity_timeout_s
    made: list[Lease] = []
    tries = 0
    try:
        while len(made) < n:
            tries += 1
            fresh, failure, cause = _fork_some(lease, min(n - len(made), per_request))
            made += fresh
            if failure is None:
                continue
            delay = failure.delay_s(tries, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S)
            if failure.fault is not Fault.FULL or time.monotonic() + delay > give_up_at:
                check_alive(lease, failure.words)
                raise refusal(failure, spec, tries=tries) from cause
            time.sleep(delay)
    except BaseException:
        for child in made:
            child.kill()
        raise
    _check_labels(made[0])
    return made


def take_snapshot(lease: Lease, name: str | None) -> str:
    """Make a snapshot and return its id.

    Raises:
        SandboxLostError: The sandbox is gone.
        SandboxError: The server refuses.
    """
    try:
        return lease.sandbox.create_snapshot(name=name).snapshot_id
    except Exception as error:
        words = read_failure(error).words
        check_alive(lease, words)
        raise SandboxError(f"no snapshot of sandbox {lease.sandbox_id}: {words}") from error


def delete_snapshot(spec: SandboxSpec, snapshot_id: str) -> bool:
    """Delete a snapshot; return whether there was one.

    Raises:
        SandboxError: The server refuses.
    """
    try:
        return Sandbox.delete_snapshot(snapshot_id, **spec.connection.params())
    except Exception as error:
        failure = read_failure(error)
        if failure.fault is Fault.NOT_FOUND:
            return False
        raise SandboxError(f"snapshot {snapshot_id!r} is not deleted: {failure.words}") from error


def _fork_some(lease: Lease, count: int) -> tuple[list[Lease], Failure | None, Exception | None]:
    spec = lease.spec
    with create_gate(spec.connection.address).pass_through(
        spec.max_concurrent_creates, timeout_s=spec.queue_timeout_s
    ):
        taken_at = time.monotonic()
        try:
            with pending_creation(), in_flight():
                answers = lease.sandbox.fork(
                    timeout=max(1, math.ceil(spec.sandbox_timeout_s)), count=count, retries=0
                )
        except Exception as error:
            return [], read_failure(error), error
    made: list[Lease] = []
    failure: Failure | None = None
    cause: Exception | None = None
    for answer in answers:
        if isinstance(answer, Exception):
            failure, cause = read_failure(answer), answer
            continue
        child = Lease(answer, spec, taken_at=taken_at, setup_output=lease.setup_output)
        made.append(child)
    return made, failure, cause


def _check_labels(child: Lease) -> None:
    """Say so where the server gives forks no labels: a sweep would not find them."""
    info = probe_info(child.sandbox_id, child.spec.connection)
    if info is not None and info.metadata.get(labels.CREATED_BY) != labels.MAKER:
        logger.warning(
            "the server at %s gives forked sandboxes no labels: a sweep does not find those a "
            "killed process leaves",
            child.spec.connection.address,
        )
