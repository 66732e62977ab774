"""Making sandboxes that are ready, or none at all: from a template, as forks, through snapshots.

How often a creation is tried again is `_retry.CREATION`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

from e2b import Sandbox, SandboxQuery
from e2b.sandbox.sandbox_api import SandboxLifecycle

from twinkle_agentic.envs.agentenv import _labels as labels
from twinkle_agentic.envs.agentenv._commands import run_command
from twinkle_agentic.envs.agentenv._config import SandboxSpec
from twinkle_agentic.envs.agentenv._handle import SandboxHandle
from twinkle_agentic.envs.agentenv._limits import limiter_of
from twinkle_agentic.envs.agentenv._retry import CREATION, check_alive
from twinkle_agentic.envs.agentenv._sdk_calls import calls, creations, exiting
from twinkle_agentic.envs.agentenv._sdk_errors import FailureKind, RequestFailure, read_failure
from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError, SandboxSetupError
from twinkle_agentic.envs.errors import SandboxError, SandboxUnavailableError
from twinkle_agentic.tools.text import truncate_middle

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FORKS_PER_REQUEST = 16  # AgentENV's limit; the SDK's is 20
_EXCERPT_CHARS = 2_000  # of a setup command's output in an error message
_FULL = (FailureKind.FULL,)
_PASSING = (*_FULL, FailureKind.SERVER, FailureKind.TIMEOUT, FailureKind.UNREACHABLE)


def start_sandbox(
    spec: SandboxSpec, *, extra_labels: Mapping[str, str] | None = None
) -> SandboxHandle:
    """Create a sandbox and run its setup commands; kill it where one fails.

    Raises:
        SandboxUnavailableError: There was no room in time, or no server.
        SandboxRefusedError: The server refuses.
        SandboxSetupError: A setup command failed.
        SandboxError: The sandbox was lost or did not answer during its setup.
    """
    handle = _create(spec, extra_labels or {})
    try:
        outputs = [_set_up(handle, index) for index in range(len(spec.setup_commands))]
    except BaseException:
        handle.kill()
        raise
    handle.setup_output = truncate_middle("\n".join(filter(None, outputs)))
    return handle


def fork_sandbox(handle: SandboxHandle, n: int) -> list[SandboxHandle]:
    """Make `n` copies of a sandbox, or none; wait for room within `spec.capacity_timeout_s`.

    Raises:
        SandboxLostError: The sandbox is lost.
        SandboxUnavailableError: Not all could be made.
    """
    spec = handle.spec
    made: list[SandboxHandle] = []

    def make_the_rest() -> None:
        while len(made) < n:
            asked_at = time.monotonic()
            with creations, calls:
                answers = handle.sandbox.fork(
                    timeout=_whole_seconds(spec.sandbox_timeout_s),
                    count=min(n - len(made), _FORKS_PER_REQUEST),
                    retries=0,
                )
                errors = [answer for answer in answers if isinstance(answer, Exception)]
                made.extend(
                    SandboxHandle(answer, spec, asked_at=asked_at, setup_output=handle.setup_output)
                    for answer in answers
                    if not isinstance(answer, Exception)
                )
            if errors:
                raise errors[0]

    try:
        _tried(spec, make_the_rest, _FULL)
    except BaseException as error:
        for child in made:
            child.kill()
        if isinstance(error, SandboxUnavailableError):
            check_alive(handle, str(error))
        raise
    for child in made:
        child.prepared = True
    _check_labels(made[0])
    return made


def take_snapshot(handle: SandboxHandle, name: str | None) -> str:
    """Make a snapshot and return its id."""
    try:
        return handle.sandbox.create_snapshot(name=name).snapshot_id
    except Exception as error:
        words = read_failure(error).words
        check_alive(handle, words)
        raise SandboxError(f"no snapshot of sandbox {handle.sandbox_id}: {words}") from error


def delete_snapshot(spec: SandboxSpec, snapshot_id: str) -> bool:
    """Delete a snapshot; return whether there was one."""
    try:
        return Sandbox.delete_snapshot(snapshot_id, **spec.connection.params())
    except Exception as error:
        failure = read_failure(error)
        if failure.kind is FailureKind.NOT_FOUND:
            return False
        raise SandboxError(f"snapshot {snapshot_id!r} is not deleted: {failure.words}") from error


def _create(spec: SandboxSpec, extra_labels: Mapping[str, str]) -> SandboxHandle:
    """Create a sandbox, once however often it is asked for.

    All tries carry one idempotency key and one label; what else came of them is killed.
    """
    params = spec.connection.params(retries=0)
    create_id = uuid.uuid4().hex
    metadata = {
        **spec.metadata,
        **labels.process_labels(spec.run),
        labels.CREATE_ID: create_id,
        **extra_labels,
    }
    lifecycle: SandboxLifecycle = {"on_timeout": "kill"}
    if spec.on_timeout == "pause":
        lifecycle = {"on_timeout": "pause", "auto_resume": True}
    maybe_made = False  # by a try whose answer was lost
    sandbox_class = Sandbox
    if spec.code_interpreter:
        from twinkle_agentic.envs.agentenv._code import CodeSandbox as sandbox_class

    def request() -> tuple[Sandbox, float]:
        nonlocal maybe_made
        asked_at = time.monotonic()
        try:
            sandbox = sandbox_class.create(
                spec.template,
                timeout=_whole_seconds(spec.sandbox_timeout_s),
                metadata=metadata,
                envs=dict(spec.envs) or None,
                idempotency_key=create_id,
                **{"lifecycle": lifecycle, **spec.create_options},
                **params,
            )
        except Exception as error:
            maybe_made = maybe_made or read_failure(error).ambiguous
            raise
        return sandbox, asked_at

    made: SandboxHandle | None = None
    with creations, calls:
        try:
            sandbox, asked_at = _tried(spec, request, _PASSING)
            handle = made = SandboxHandle(sandbox, spec, asked_at=asked_at)
        except BaseException as error:
            maybe_made = maybe_made or not isinstance(error, SandboxError)
            raise
        finally:
            if maybe_made:
                _kill_others(spec, create_id, keep=made)
    if exiting.is_set():
        handle.kill()
        raise SandboxUnavailableError("the interpreter exits")
    return handle


def _tried(spec: SandboxSpec, request: Callable[[], T], retried: tuple[FailureKind, ...]) -> T:
    """Make a request that creates sandboxes, again where it fails in one of the ways `retried`.

    Each try holds a place among the creations of the process.

    Raises:
        SandboxUnavailableError: It failed for good, or no place became free.
    """
    limiter = limiter_of(spec.connection.address, "creations")
    tries = 0
    give_up_at: float | None = None
    while True:
        tries += 1
        with limiter.place(spec.max_concurrent_creates, timeout_s=spec.queue_timeout_s):
            give_up_at = give_up_at or time.monotonic() + spec.capacity_timeout_s
            try:
                return request()
            except Exception as error:
                failure, cause = read_failure(error), error
        delay = CREATION.delay_s(failure, tries) if failure.kind in retried else None
        if delay is None or time.monotonic() + delay > give_up_at or exiting.wait(delay):
            raise _refusal(failure, spec, tries) from cause


def _refusal(failure: RequestFailure, spec: SandboxSpec, tries: int) -> SandboxUnavailableError:
    server = f"the server at {spec.connection.address}"
    words = failure.words + spec.connection.proxy_hint()
    match failure.kind:
        case FailureKind.METHOD:
            return SandboxRefusedError(
                f"{server} does not know `POST /v2/sandboxes` (405): it is an AgentENV from before "
                "its pull request 306 (late September 2026). Update AgentENV; an older one works "
                f"with e2b<=2.50.0 only, and e2b {importlib.metadata.version('e2b')} is installed, "
                "which twinkle-envs-agentenv needs"
            )
        case FailureKind.UNAUTHORIZED:
            return SandboxRefusedError(
                f"{server} refuses the API key ({words}): pass api_key or set E2B_API_KEY"
            )
        case FailureKind.FULL:
            return SandboxUnavailableError(
                f"{server} had no room for a sandbox of template {spec.template!r} within "
                f"capacity_timeout_s={spec.capacity_timeout_s:g} ({tries} tries, the last answer: "
                f"{words}): raise capacity_timeout_s, run fewer episodes at once, or give the "
                "server room"
            )
        case FailureKind.SERVER | FailureKind.TIMEOUT | FailureKind.UNREACHABLE:
            return SandboxUnavailableError(
                f"{server} gave no sandbox of template {spec.template!r} in {tries} tries: {words}"
            )
        case _:
            return SandboxRefusedError(
                f"{server} refuses a sandbox of template {spec.template!r} ({words}): check that "
                "it is a sandbox server, that the template was built there and that the arguments "
                "fit it"
            )


def _kill_others(spec: SandboxSpec, create_id: str, *, keep: SandboxHandle | None) -> None:
    """Kill the sandboxes of tries whose answers were lost."""
    params = spec.connection.params(retries=1)
    query = SandboxQuery(metadata={labels.CREATE_ID: create_id})
    kept = None if keep is None else keep.sandbox_id
    try:
        for info in Sandbox.list(query=query, limit=100, **params).next_items():
            # The server may not filter: the label decides.
            if info.metadata.get(labels.CREATE_ID) == create_id and info.sandbox_id != kept:
                Sandbox.kill(info.sandbox_id, **params)
    except Exception as error:
        logger.warning(
            "a creation of template %r may have left a sandbox behind (label %s=%s): %s",
            spec.template,
            labels.CREATE_ID,
            create_id,
            read_failure(error).words,
        )


def _set_up(handle: SandboxHandle, index: int) -> str:
    spec = handle.spec
    command = spec.setup_commands[index]
    run = run_command(handle, command, timeout_s=spec.command_timeout_s)
    output = run.output()
    if (run.exit_code == 0 and not run.timed_out) or spec.setup_errors == "observe":
        return output
    how = f"ended with exit code {run.exit_code}"
    if run.timed_out:
        how = f"did not end within {spec.command_timeout_s:g} s (command_timeout)"
    raise SandboxSetupError(
        f"setup command {index + 1} of {len(spec.setup_commands)} {how}: {command!r} printed "
        f"{truncate_middle(output, _EXCERPT_CHARS)!r}",
        command=command,
        exit_code=run.exit_code,
        output=str(output),
        retryable=run.timed_out,
    )


def _check_labels(child: SandboxHandle) -> None:
    """Say so where the server gives forks no labels: a sweep would not find them."""
    connection = child.spec.connection
    try:
        with calls:
            info = Sandbox.get_info(child.sandbox_id, **connection.params(retries=0))
    except Exception:  # it was only to be looked at
        return
    if info.metadata.get(labels.CREATED_BY) != labels.MAKER:
        logger.warning(
            "the server at %s gives forked sandboxes no labels: a sweep does not find those a "
            "killed process leaves",
            connection.address,
        )


def _whole_seconds(seconds: float) -> int:
    return max(1, math.ceil(seconds))
