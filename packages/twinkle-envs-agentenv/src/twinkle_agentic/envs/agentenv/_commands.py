"""Running one command in a sandbox: its output whatever happens, and its certain end."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping

from e2b import CommandExitException, CommandHandle
from e2b.api import max_connections

from twinkle_agentic.envs.agentenv._handle import SandboxHandle
from twinkle_agentic.envs.agentenv._limits import limiter_of
from twinkle_agentic.envs.agentenv._output import CommandRun
from twinkle_agentic.envs.agentenv._retry import check_alive, repeated
from twinkle_agentic.envs.agentenv._sdk_calls import calls
from twinkle_agentic.envs.agentenv._sdk_errors import FailureKind, read_failure
from twinkle_agentic.envs.agentenv.errors import CommandBrokenError, ToolFaultError
from twinkle_agentic.envs.errors import EnvTimeoutError, SandboxError
from twinkle_agentic.tools.text import MAX_TEXT_CHARS, clean_text

logger = logging.getLogger(__name__)

_MAX_COMMAND_BYTES = 131_071  # Linux MAX_ARG_STRLEN less the final NUL: `bash -c` takes it as one
_MARK = "TWINKLE_COMMAND"
"""In the environment of a command and of all it starts, so that they can be found and killed."""
_KILL_S = 10.0  # one try at killing what a command left
_KILL_TRIES = 3
# A process left in the background keeps its command running while it holds the output open.
_BACKGROUND = re.compile(r"(?<![&><])&(?![&>\d])")
COMMANDS_AT_ONCE = max(1, max_connections - 20)
"""Per server; the other connections are for other requests."""
_CAUSE_CHARS = 200
_SIGNALLED = -1  # the exit code of a process that a signal ended


def run_command(
    handle: SandboxHandle,
    command: str,
    *,
    timeout_s: float,
    cwd: str | None = None,
    envs: Mapping[str, str] | None = None,
    user: str | None = None,
    max_chars: int = MAX_TEXT_CHARS,
    outlasted: bool = True,
) -> CommandRun:
    """Run a command in a login shell and wait for its end.

    Args:
        handle: The sandbox.
        command: For `bash -l -c`.
        timeout_s: Seconds until it is killed, together with every process it started.
        cwd: Working directory; the user's home by default.
        envs: Added to its environment.
        user: Whom it runs as.
        max_chars: Characters kept of each stream, head and tail.
        outlasted: Make the sandbox's time on the server outlast the command.

    Raises:
        CommandBrokenError: The connection broke while it ran; it was killed.
        Exception: As `repeated`.
    """
    command = _checked(command)
    mark = uuid.uuid4().hex
    run = CommandRun(timeout_s, max_chars=max_chars)
    if _BACKGROUND.search(command):
        run.advice = "; to leave a process running, redirect its output: command > log 2>&1 &"
    if outlasted:
        handle.extend_lifetime_to_cover(timeout_s)

    def start() -> CommandHandle[None]:
        return handle.sandbox.commands.run(
            command,
            background=True,
            envs={**(envs or {}), _MARK: mark},
            user=user,
            cwd=cwd,
            timeout=timeout_s,
            retain_output=False,
        )

    spec = handle.spec
    limiter = limiter_of(spec.connection.address, "commands")
    with limiter.place(COMMANDS_AT_ONCE, timeout_s=spec.queue_timeout_s), calls:
        started = time.monotonic()
        try:
            process = repeated(handle, f"running {command[:80]!r}", start, repeatable=False)
        except EnvTimeoutError as error:
            _kill_processes(handle, mark)
            raise SandboxError(
                f"{command[:80]!r} did not begin in sandbox {handle.sandbox_id} within "
                f"{timeout_s:g} s, though the sandbox answers: nothing is known of what it did",
                retryable=True,
            ) from error
        _follow(handle, process, run, mark, started, command)
    run.duration_s = time.monotonic() - started
    return run


def _follow(
    handle: SandboxHandle,
    process: CommandHandle[None],
    run: CommandRun,
    mark: str,
    started: float,
    command: str,
) -> None:
    """Record a command's output and exit code until it ends. Raises as `run_command`."""
    error: Exception
    try:
        process.wait(on_stdout=run.stdout.add, on_stderr=run.stderr.add)
        run.exit_code = 0
        return
    except CommandExitException as exited:
        run.exit_code = exited.exit_code
        if exited.exit_code != _SIGNALLED:
            return
        error = exited
    except Exception as broken:
        error = broken
    # The server's clock started later and may stop a little earlier.
    late = time.monotonic() - started >= run.timeout_s * 0.95 - 0.1
    signalled = isinstance(error, CommandExitException)
    if late and (signalled or read_failure(error).kind is FailureKind.TIMEOUT):
        run.timed_out, run.exit_code = True, None
        _kill_processes(handle, mark)
        return
    if signalled:
        check_alive(handle, "its process was killed", tries=1)
        run.cause = clean_text(error.error or "")[:_CAUSE_CHARS]
        return
    words = read_failure(error).words
    check_alive(handle, words)
    _kill_processes(handle, mark)
    raise CommandBrokenError(
        f"the connection to sandbox {handle.sandbox_id} broke while {command[:80]!r} ran "
        f"({words}); the command was killed and what it had done stays",
        output=run.output(),
    ) from error


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


def _kill_processes(handle: SandboxHandle, mark: str) -> None:
    """Kill every process that carries a mark, however far it has moved from its parent."""
    script = _KILL_SCRIPT.format(variable=_MARK, mark=mark)
    words = ""
    for _ in range(_KILL_TRIES):
        try:
            left = handle.sandbox.commands.run(script, timeout=_KILL_S).stdout.strip()
        except Exception as error:
            words = read_failure(error).words
            check_alive(handle, words)
            continue
        if left != "0":
            logger.warning(
                "sandbox %s still runs %s processes of a command that was killed",
                handle.sandbox_id,
                left,
            )
        return
    raise EnvTimeoutError(
        f"sandbox {handle.sandbox_id} does not answer after a command was to be killed ({words}): "
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
