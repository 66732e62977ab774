"""What can be done with the sandbox an env holds, and the note taken when it is gone."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from twinkle_agentic.envs.agentenv.default_tools import seconds_argument, text_argument
from twinkle_agentic.envs.agentenv.hold import Hold
from twinkle_agentic.envs.agentenv.types import ExecResult, SandboxSpec
from twinkle_agentic.envs.agentenv.waiting import check_process, exiting, interruptible
from twinkle_agentic.envs.errors import (
    EnvTimeoutError,
    SandboxError,
    SandboxLostError,
    TwinkleEnvError,
)
from twinkle_agentic.tools.text import clean_text

if TYPE_CHECKING:
    from e2b import Sandbox

    from twinkle_agentic.envs.agentenv.commands import CommandRun
    from twinkle_agentic.envs.agentenv.lease import Lease

__all__ = ["SandboxAccess"]

_EXEC_CHARS = 2**20  # of each stream that `exec` keeps: a grader reads more than a model


class SandboxAccess:
    """The part of `AgentEnv` that handlers and graders use.

    Args:
        spec: What its sandboxes are made from.
        refresh_timeout: Keep the sandbox at least as long as a running command.
    """

    def __init__(self, spec: SandboxSpec, *, refresh_timeout: bool) -> None:
        self.refresh_timeout = refresh_timeout
        self._spec = spec
        self._ended: TwinkleEnvError | None = None
        self._notes: dict[str, Any] = {}
        self._new_hold()

    @property
    def spec(self) -> SandboxSpec:
        """What this env's sandboxes are made from."""
        return self._spec

    @property
    def sandbox(self) -> Sandbox | None:
        """The SDK's handle of the running sandbox, for its terminal, file watches and the like.

        Raises:
            SandboxRefusedError: This process was forked from one that had used the SDK.
        """
        lease = self._hold.lease
        if lease is None:
            return None
        check_process()
        return lease.sandbox

    @property
    def sandbox_id(self) -> str | None:
        """The id of the running sandbox; `None` before `reset` and after `close`."""
        lease = self._hold.lease
        return None if lease is None else lease.sandbox_id

    def run_command(self, arguments: Mapping[str, Any]) -> str:
        """Run a command as the tool `run_command` does, for handlers.

        Args:
            arguments: `command`, and optionally `cwd` and `timeout` (seconds, by default
                `command_timeout`).

        Returns:
            What it printed; standard error, a non-zero exit code and a timeout follow as marked
            parts. At most 32,768 characters.

        Raises:
            ToolFaultError: There is no command, or it cannot be started.
            SandboxError: The sandbox is lost or failed.
            EnvTimeoutError: The sandbox does not answer.
        """
        command = text_argument(arguments, "command")
        cwd = text_argument(arguments, "cwd", optional=True) or None
        run = self._command(command, timeout_s=arguments.get("timeout"), cwd=cwd)
        self._notes["exit_code"] = run.exit_code
        if run.timed_out:
            self._notes["timed_out"] = True
        return run.observation()

    def exec(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command and return its parts, for graders and handlers.

        Args:
            command: For `bash -l -c`.
            timeout_s: Seconds it may take; by default `command_timeout`.
            cwd: Working directory; the home directory by default.
            envs: Added to its environment.
            user: Whom it runs as; the server's default user by default.

        Returns:
            Each stream with at most 1,048,576 characters, head and tail.

        Raises:
            ToolFaultError: It cannot be started.
            SandboxError: The sandbox is lost or failed, or there is none.
            EnvTimeoutError: The sandbox does not answer.
        """
        return self._command(
            command,
            timeout_s=timeout_s,
            cwd=cwd,
            envs=envs,
            user=user,
            max_chars=_EXEC_CHARS,
        ).result

    def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file, its directories too; an existing one is replaced.

        Raises:
            ToolFaultError: The path cannot be written, or the disk is full.
            SandboxError: The sandbox is lost or failed, or there is none.
            EnvTimeoutError: No answer within `request_timeout`.
        """
        from twinkle_agentic.envs.agentenv.files import write_bytes

        data = clean_text(content).encode() if isinstance(content, str) else content
        with self._watched() as lease:
            interruptible(write_bytes, lease, path, data)

    def read_file(self, path: str) -> bytes:
        """Read a file of at most 64 MiB.

        Raises:
            ToolFaultError: There is no such file, or it is longer.
            SandboxError: The sandbox is lost or failed, or there is none.
            EnvTimeoutError: No answer within `request_timeout`.
        """
        from twinkle_agentic.envs.agentenv.files import read_bytes

        with self._watched() as lease:
            return interruptible(read_bytes, lease, path)

    def snapshot(self, name: str | None = None) -> str:
        """Keep the state of the sandbox as a template of its own.

        Returns:
            Its id, for the `template` of other envs; it stays on the server until
            `delete_snapshot`.

        Raises:
            SandboxError: The sandbox is lost, there is none, or the server makes no snapshot of it.
        """
        from twinkle_agentic.envs.agentenv.branching import take_snapshot

        with self._watched() as lease:
            return interruptible(take_snapshot, lease, name)

    def delete_snapshot(self, snapshot_id: str) -> bool:
        """Delete a snapshot from the server; return whether there was one.

        Raises:
            SandboxError: The server does not delete it.
        """
        from twinkle_agentic.envs.agentenv.branching import delete_snapshot

        return delete_snapshot(self._spec, snapshot_id)

    def _new_hold(self) -> None:
        self._hold = Hold()
        weakref.finalize(self, Hold.abandon, self._hold).atexit = False

    def _command(self, command: str, *, timeout_s: object, **options: Any) -> CommandRun:
        from twinkle_agentic.envs.agentenv.commands import run_command

        limit_s = self._spec.command_timeout_s if timeout_s is None else seconds_argument(timeout_s)
        with self._watched() as lease:
            return interruptible(
                run_command,
                lease,
                command,
                timeout_s=limit_s,
                keep_lease=self.refresh_timeout,
                **options,
            )

    @contextlib.contextmanager
    def _watched(self) -> Generator[Lease, None, None]:
        """Give the running sandbox, and take note when it turns out to be gone."""
        lease = self._hold.lease
        if self._ended is not None:
            raise _copy(self._ended)
        if lease is None:
            raise SandboxError("there is no sandbox: call reset() first")
        check_process()
        if exiting.is_set():
            raise SandboxError("the interpreter exits")
        try:
            yield lease
        except (SandboxLostError, EnvTimeoutError) as error:
            self._end(lease, error)
            raise

    def _end(self, lease: Lease, error: TwinkleEnvError) -> None:
        # A call that outlived its episode says nothing about the sandbox of the next one.
        if self._hold.lease is lease:
            self._ended = _copy(error)

    def _look_for_loss(self, error: Exception) -> None:
        """Find out whether a handler that used the SDK failed because the sandbox is gone."""
        from twinkle_agentic.envs.agentenv.failures import comes_from_sdk, read_failure
        from twinkle_agentic.envs.agentenv.recovery import check_alive

        lease = self._hold.lease
        if lease is None or not comes_from_sdk(error):
            return
        try:
            check_alive(lease, read_failure(error).words)
        except SandboxLostError as gone:
            self._end(lease, gone)
        except SandboxError:  # the server cannot be asked from here
            return

    def _refresh(self) -> None:
        lease = self._hold.lease
        if not self.refresh_timeout or lease is None:
            return
        trouble = lease.renew()
        if trouble is not None:
            self._notes["refresh_error"] = trouble


def _copy(error: TwinkleEnvError) -> TwinkleEnvError:
    """Return the error without the frames it passed through, which would keep everything alive."""
    return type(error)(str(error), retryable=error.retryable)
