"""Running one command in a sandbox: its output whatever happens, and its certain end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from e2b import CommandExitException, CommandHandle
from e2b.api import max_connections

from twinkle_agentic.envs.agentenv.errors import CommandBrokenError, ToolFaultError
from twinkle_agentic.envs.agentenv.failures import Fault, read_failure
from twinkle_agentic.envs.agentenv.gate import command_gate
from twinkle_agentic.envs.agentenv.lease import Lease
from twinkle_agentic.envs.agentenv.output import Clip, observation_of, stream_clip
from twinkle_agentic.envs.agentenv.recovery import Recovery, check_alive
from twinkle_agentic.envs.agentenv.types import ExecResult
from twinkle_agentic.envs.agentenv.waiting import in_flight
from twinkle_agentic.envs.errors import EnvTimeoutError, SandboxError
from twinkle_agentic.tools.text import MAX_TEXT_CHARS, clean_text

logger = logging.getLogger(__name__)

__all__ = ["CommandRun", "run_command"]

_MAX_COMMAND_BYTES = 131_071  # Linux MAX_ARG_STRLEN less the final NUL: `bash -c` takes it as one
_MARK = "TWINKLE_COMMAND"
"""In the environment of a command and of all it starts, so that they can be found and killed."""
_KILL_S = 10.0  # one try at killing what a command left
_KILL_TRIES = 3
# A process left in the background keeps its command running while it holds the output open.
_BACKGROUND = re.compile(r"(?<![&><])&(?![&>\d])")
_AT_ONCE = max(1, max_connections - 20)  # commands per server; the rest is for other requests
_CAUSE_CHARS = 200
_SIGNALLED = -1  # the exit code of a process that a signal ended


@dataclass(slots=True)
class CommandRun:
    """A command that has ended.

    Attributes:
        stdout: What it printed.
        stderr: Likewise.
        exit_code: `None` where it was killed at its time limit.
        timeout_s: The limit.
        timed_out: Whether it ran into it.
        duration_s: Wall time.
        hint: For the model, where it was killed.
        cause: The server's words for what killed it before its limit.
    """

    stdout: Clip
    stderr: Clip
    timeout_s: float
    exit_code: int | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    hint: str = ""
    cause: str = ""

    @property
    def result(self) -> ExecResult:
        """The plain data of it."""
        return ExecResult(
            stdout=self.stdout.text(),
            stderr=self.stderr.text(),
            exit_code=self.exit_code,
            timed_out=self.timed_out,
            duration_s=self.duration_s,
            cut_chars=self.stdout.cut + self.stderr.cut,
        )

    def observation(self, max_chars: int = MAX_TEXT_CHARS) -> str:
        """Render it for a model."""
        return observation_of(
            self.stdout,
            self.stderr,
            exit_code=self.exit_code,
            timed_out_after_s=self.timeout_s if self.timed_out else None,
            hint=self.hint,
            cause=self.cause,
            max_chars=max_chars,
        )


def run_command(
    lease: Lease,
    command: str,
    *,
    timeout_s: float,
    cwd: str | None = None,
    envs: Mapping[str, str] | None = None,
    user: str | None = None,
    max_chars: int = MAX_TEXT_CHARS,
    keep_lease: bool = True,
) -> CommandRun:
    """Run a command in a login shell and wait for its end.

    Args:
        lease: The sandbox.
        command: For `bash -l -c`.
        timeout_s: Seconds until it is killed, together with every process it started.
        cwd: Working directory; the user's home by default.
        envs: Added to its environment.
        user: Whom it runs as.
        max_chars: Characters kept of each stream, head and tail.
        keep_lease: Make the sandbox's time on the server outlast the command.

    Raises:
        ToolFaultError: It could not be started: no such directory, too long.
        SandboxLostError: The sandbox is gone.
        EnvTimeoutError: The sandbox does not answer, though the server says it runs.
        CommandBrokenError: The connection broke while it ran; it was killed.
        SandboxError: It could not be started for another reason.
    """
    command = _checked(command)
    mark = uuid.uuid4().hex
    run = CommandRun(stream_clip(max_chars), stream_clip(max_chars), timeout_s)
    if _BACKGROUND.search(command):
        run.hint = "; to leave a process running, redirect its output: command > log 2>&1 &"
    if keep_lease:
        lease.cover(timeout_s)  # where that fails the command itself tells
    gate = command_gate(lease.spec.connection.address)
    with gate.pass_through(_AT_ONCE, timeout_s=lease.spec.queue_timeout_s), in_flight():
        begun = time.monotonic()
        handle = _start(lease, command, mark, timeout_s, cwd=cwd, envs=envs, user=user)
        lease.fresh = False
        return _finish(lease, handle, run, mark, begun, command)


def _start(
    lease: Lease,
    command: str,
    mark: str,
    timeout_s: float,
    *,
    cwd: str | None,
    envs: Mapping[str, str] | None,
    user: str | None,
) -> CommandHandle[None]:
    """Start a command and return when it runs. Raises as `run_command`."""
    recovery = Recovery(lease, f"running {command[:80]!r}", repeatable=False)
    while True:
        begun = time.monotonic()
        try:
            return lease.sandbox.commands.run(
                command,
                background=True,
                envs={**(envs or {}), _MARK: mark},
                user=user,
                cwd=cwd,
                timeout=timeout_s,
                retain_output=False,
            )
        except Exception as error:
            if not _is_deadline(error, begun, timeout_s):
                recovery.again(error)
                continue
            _end_processes(lease, mark)
            raise SandboxError(
                f"{command[:80]!r} did not begin in sandbox {lease.sandbox_id} within "
                f"{timeout_s:g} s, though the sandbox answers: nothing is known of what it did",
                retryable=True,
            ) from error


def _finish(
    lease: Lease,
    handle: CommandHandle[None],
    run: CommandRun,
    mark: str,
    begun: float,
    command: str,
) -> CommandRun:
    """Take in a command's output until it ends. Raises as `run_command`."""
    timeout_s = run.timeout_s
    try:
        handle.wait(on_stdout=run.stdout.add, on_stderr=run.stderr.add)
        run.exit_code = 0
    except CommandExitException as error:
        run.exit_code = error.exit_code
        if run.exit_code == _SIGNALLED:
            if _deadline_passed(begun, timeout_s):
                return _killed(lease, run, mark, begun)
            check_alive(lease, "its process was killed", tries=1)
            run.cause = clean_text(error.error or "")[:_CAUSE_CHARS]
    except Exception as error:
        if _is_deadline(error, begun, timeout_s):
            return _killed(lease, run, mark, begun)
        words = read_failure(error).words
        check_alive(lease, words)
        _end_processes(lease, mark)
        raise CommandBrokenError(
            f"the connection to sandbox {lease.sandbox_id} broke while {command[:80]!r} ran "
            f"({words}); the command was killed and what it had done stays",
            output=run.observation(),
        ) from error
    run.duration_s = time.monotonic() - begun
    return run


def _checked(command: str) -> str:
    command = clean_text(command)
    if "\0" in command:
        raise ToolFaultError("the command holds a NUL character, which no shell accepts")
    size = len(command.encode())
    if size > _MAX_COMMAND_BYTES:
        raise ToolFaultError(
            f"the command has {size} bytes and a shell takes {_MAX_COMMAND_BYTES}: write it to a "
            "file and run that"
        )
    return command


def _is_deadline(error: Exception, begun: float, timeout_s: float) -> bool:
    return read_failure(error).fault is Fault.TIMEOUT and _deadline_passed(begun, timeout_s)


def _deadline_passed(begun: float, timeout_s: float) -> bool:
    # The server's clock started later and may stop a little earlier.
    return time.monotonic() - begun >= timeout_s * 0.95 - 0.1


def _killed(lease: Lease, run: CommandRun, mark: str, begun: float) -> CommandRun:
    """Finish the record of a command that ran into its limit, and see to it that it has ended."""
    run.timed_out = True
    run.exit_code = None
    _end_processes(lease, mark)
    run.duration_s = time.monotonic() - begun
    return run


def _end_processes(lease: Lease, mark: str) -> None:
    """Kill every process that carries a mark, however far it has moved from its parent.

    Raises:
        SandboxLostError: The sandbox is gone.
        EnvTimeoutError: The sandbox does not answer.
    """
    script = _KILL_SCRIPT.format(variable=_MARK, mark=mark)
    words = ""
    for _ in range(_KILL_TRIES):
        try:
            left = lease.sandbox.commands.run(script, timeout=_KILL_S).stdout.strip()
        except Exception as error:
            words = read_failure(error).words
            check_alive(lease, words)
            continue
        if left != "0":
            logger.warning(
                "sandbox %s still runs %s processes of a command that was killed",
                lease.sandbox_id,
                left,
            )
        return
    raise EnvTimeoutError(
        f"sandbox {lease.sandbox_id} does not answer after a command was to be killed ({words}): "
        "call reset() for a new one"
    )


# Bash alone, for an image may hold little else. The environment of a process is what it was started
# with, so the shell that runs this does not carry the mark; a process that is killed while it forks
# may have a child by then, hence the rounds.
_KILL_SCRIPT = """
for round in 1 2 3 4 5 6 7 8 9 10; do
  left=0
  for d in /proc/[0-9]*; do
    while IFS= read -r -d '' entry; do
      if [ "$entry" = "{variable}={mark}" ]; then
        kill -9 "${{d#/proc/}}"; left=$((left + 1)); break
      fi
    done < "$d/environ"
  done
  [ "$left" = 0 ] && break
  sleep 0.05
done 2>/dev/null
echo "$left"
"""
