"""From a spec to a sandbox that is ready: created once, set up, or gone again."""

from __future__ import annotations

import importlib.metadata
import logging
import math
import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

from e2b import Sandbox, SandboxQuery
from e2b.sandbox.sandbox_api import SandboxLifecycle

from twinkle_agentic.envs.agentenv import labels
from twinkle_agentic.envs.agentenv.commands import run_command
from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError, SandboxSetupError
from twinkle_agentic.envs.agentenv.failures import Failure, Fault, read_failure
from twinkle_agentic.envs.agentenv.gate import create_gate
from twinkle_agentic.envs.agentenv.lease import Lease
from twinkle_agentic.envs.agentenv.types import SandboxSpec
from twinkle_agentic.envs.agentenv.waiting import exiting, in_flight, pending_creation
from twinkle_agentic.envs.errors import SandboxError, SandboxUnavailableError
from twinkle_agentic.tools.text import truncate_middle

logger = logging.getLogger(__name__)

__all__ = ["create_sandbox", "refusal", "start_sandbox"]

_ATTEMPTS = 4  # of a creation that failed for another reason than a lack of room
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 5.0
_HINT_CHARS = 2_000  # of a setup command's output in an error message


def start_sandbox(spec: SandboxSpec, *, extra_labels: Mapping[str, str] | None = None) -> Lease:
    """Create a sandbox and run its setup commands; kill it again where one fails.

    Args:
        spec: What to start.
        extra_labels: Labels beyond those of the process and the spec.

    Raises:
        SandboxUnavailableError: No sandbox could be created.
        SandboxSetupError: A setup command failed.
        SandboxError: The sandbox was lost or did not answer during its setup.
    """
    lease = create_sandbox(spec, extra_labels=extra_labels)
    try:
        outputs = [_set_up(lease, index) for index in range(len(spec.setup_commands))]
    except BaseException:
        lease.kill()
        raise
    lease.setup_output = truncate_middle("\n".join(filter(None, outputs)))
    return lease


def create_sandbox(spec: SandboxSpec, *, extra_labels: Mapping[str, str] | None = None) -> Lease:
    """Create a sandbox.

    Refusals for want of room (429, 503) and failures that may pass (other 5xx, no connection) are
    tried again with growing, jittered delays, a `Retry-After` honoured, within
    `spec.capacity_timeout_s`. All tries carry one idempotency key and one label, and whatever else
    came of them is killed.

    Raises:
        SandboxUnavailableError: There was no room in time, or no server.
        SandboxRefusedError: The server refuses.
    """
    params = spec.connection.params(retries=0)
    create_id = uuid.uuid4().hex
    metadata = {
        **spec.metadata,
        **labels.process_labels(spec.run),
        labels.CREATE_ID: create_id,
        **(extra_labels or {}),
    }
    with pending_creation(), in_flight():
        sandbox, taken_at, unsure = _ask(spec, metadata, create_id, params)
        lease = Lease(sandbox, spec, taken_at=taken_at)
    if exiting.is_set():
        lease.kill()
        raise SandboxUnavailableError("the interpreter exits")
    if unsure:
        _kill_strays(spec, create_id, keep=lease.sandbox_id)
    return lease


def _ask(
    spec: SandboxSpec, metadata: dict[str, str], create_id: str, params: dict[str, Any]
) -> tuple[Sandbox, float, bool]:
    """Ask until there is an answer; return the sandbox, when it was asked for, and a doubt.

    The doubt is whether an earlier try made a sandbox too.
    """
    gate = create_gate(spec.connection.address)
    unsure = False
    tries = 0
    give_up_at: float | None = None
    try:
        while True:
            tries += 1
            with gate.pass_through(spec.max_concurrent_creates, timeout_s=spec.queue_timeout_s):
                taken_at = time.monotonic()
                if give_up_at is None:
                    give_up_at = taken_at + spec.capacity_timeout_s
                try:
                    return _request(spec, metadata, create_id, params), taken_at, unsure
                except Exception as error:
                    failure = read_failure(error)
                    unsure = unsure or failure.ambiguous
                    cause = error
            delay = _delay(failure, tries)
            if delay is None or time.monotonic() + delay > give_up_at or exiting.wait(delay):
                raise refusal(failure, spec, tries=tries) from cause
    except BaseException as error:
        # A creation that was interrupted, or whose answer never came, may have happened.
        if unsure or not isinstance(error, SandboxError):
            _kill_strays(spec, create_id, keep=None)
        raise


def refusal(failure: Failure, spec: SandboxSpec, *, tries: int = 1) -> SandboxUnavailableError:
    """Make the error of a creation that failed for good."""
    server, words = f"the server at {spec.connection.address}", failure.words
    words += spec.connection.proxy_hint()
    match failure.fault:
        case Fault.METHOD:
            return SandboxRefusedError(
                f"{server} does not know `POST /v2/sandboxes` (405): it is an AgentENV from before "
                "its pull request 306 (late September 2026). Update AgentENV; an older one works "
                f"with e2b<=2.50.0 only, and e2b {importlib.metadata.version('e2b')} is installed, "
                "which twinkle-envs-agentenv needs"
            )
        case Fault.UNAUTHORIZED:
            return SandboxRefusedError(
                f"{server} refuses the API key ({words}): pass api_key or set E2B_API_KEY"
            )
        case Fault.FULL:
            return SandboxUnavailableError(
                f"{server} had no room for a sandbox of template {spec.template!r} within "
                f"capacity_timeout_s={spec.capacity_timeout_s:g} ({tries} tries, the last answer: "
                f"{words}): raise capacity_timeout_s, run fewer episodes at once, or give the "
                "server room"
            )
        case Fault.REFUSED | Fault.NOT_FOUND | Fault.BAD_ARGUMENT | Fault.PAUSED:
            return SandboxRefusedError(
                f"{server} refuses a sandbox of template {spec.template!r} ({words}): check that "
                "it is a sandbox server, that the template was built there and that the arguments "
                "fit it"
            )
        case Fault.SERVER | Fault.TIMEOUT | Fault.UNREACHABLE:
            return SandboxUnavailableError(
                f"{server} gave no sandbox of template {spec.template!r} in {tries} tries: {words}"
            )


def _request(
    spec: SandboxSpec, metadata: dict[str, str], create_id: str, params: dict[str, Any]
) -> Sandbox:
    lifecycle: SandboxLifecycle = {"on_timeout": "kill"}
    if spec.on_timeout == "pause":
        lifecycle = {"on_timeout": "pause", "auto_resume": True}
    return Sandbox.create(
        spec.template,
        timeout=max(1, math.ceil(spec.sandbox_timeout_s)),
        metadata=metadata,
        envs=dict(spec.envs) or None,
        idempotency_key=create_id,
        **{"lifecycle": lifecycle, **spec.create_options},
        **params,
    )


def _delay(failure: Failure, tries: int) -> float | None:
    """Return the seconds until the next try; `None` where there is to be none."""
    retried = failure.fault in (Fault.FULL, Fault.SERVER, Fault.TIMEOUT, Fault.UNREACHABLE)
    if not retried or (failure.fault is not Fault.FULL and tries >= _ATTEMPTS):
        return None
    delay = failure.delay_s(tries, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S)
    return delay if failure.retry_after_s is None else delay + random.uniform(0, 0.25)


def _kill_strays(spec: SandboxSpec, create_id: str, *, keep: str | None) -> None:
    """Kill what came of the tries whose answers were lost."""
    params = spec.connection.params(retries=1)
    query = SandboxQuery(metadata={labels.CREATE_ID: create_id})
    try:
        found = Sandbox.list(query=query, limit=100, **params).next_items()
        for info in found:
            # The server may not filter: the label decides.
            if info.metadata.get(labels.CREATE_ID) == create_id and info.sandbox_id != keep:
                Sandbox.kill(info.sandbox_id, **params)
    except Exception as error:
        logger.warning(
            "a creation of template %r may have left a sandbox behind (label %s=%s): %s",
            spec.template,
            labels.CREATE_ID,
            create_id,
            read_failure(error).words,
        )


def _set_up(lease: Lease, index: int) -> str:
    spec = lease.spec
    command = spec.setup_commands[index]
    run = run_command(lease, command, timeout_s=spec.command_timeout_s)
    output = run.observation()
    result = run.result
    if (result.exit_code == 0 and not result.timed_out) or spec.setup_errors == "observe":
        return output
    how = (
        f"did not end within {spec.command_timeout_s:g} s (command_timeout)"
        if result.timed_out
        else f"ended with exit code {result.exit_code}"
    )
    raise SandboxSetupError(
        f"setup command {index + 1} of {len(spec.setup_commands)} {how}: {command!r} printed "
        f"{truncate_middle(output, _HINT_CHARS)!r}",
        command=command,
        exit_code=result.exit_code,
        output=output,
        retryable=result.timed_out,
    )
