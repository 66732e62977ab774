"""One sandbox per episode as an `Env`.

`AgentEnv` holds no connection and no thread: it is a thin client of the `e2b` SDK, which is
imported by the first `reset`. The modules beside this one start a sandbox, run commands in it and
tell its failures apart.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from twinkle_agentic.envs.agentenv import _labels as labels
from twinkle_agentic.envs.agentenv._command_tool import CommandTemplate
from twinkle_agentic.envs.agentenv._config import (
    Connection,
    OnTimeout,
    SandboxSpec,
    SetupErrors,
)
from twinkle_agentic.envs.agentenv._default_tools import (
    CODE_TOOLS,
    DEFAULT_TOOLS,
    ToolHandler,
    seconds_argument,
    text_argument,
)
from twinkle_agentic.envs.agentenv._output import CommandOutput, CommandRun, ExecResult
from twinkle_agentic.envs.agentenv._sdk_calls import check_process, interruptible
from twinkle_agentic.envs.agentenv._slot import SandboxSlot
from twinkle_agentic.envs.agentenv.errors import (
    CommandBrokenError,
    SandboxRefusedError,
    ToolFaultError,
)
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import (
    ErrorKind,
    SandboxError,
    SandboxLostError,
    TwinkleEnvError,
)
from twinkle_agentic.tools.text import clean_text, to_text
from twinkle_agentic.tools.types import ToolInfo, Trajectory, user_data_get

if TYPE_CHECKING:
    from e2b import Sandbox

    from twinkle_agentic.envs.agentenv._handle import SandboxHandle
    from twinkle_agentic.envs.agentenv._pool import SandboxPool

_MAX_FAILURES = 3  # of the sandbox in a row, none of them the model's, before the episode ends
_EXEC_CHARS = 2**20  # of each stream that `exec` keeps: a grader reads more than a model


class AgentEnv(Env):
    """A sandbox of an AgentENV server, or another server that speaks the E2B protocol, per episode.

    `reset` starts a sandbox, `step` runs a tool in it, `close` kills it. It is killed on every
    other path too: a failed setup, an exception, Ctrl-C, an env that is garbage, the exit of the
    interpreter; what a `kill -9` leaves carries labels and goes with `twinkle-rollout sweep`.
    `step` does not raise: what the model did wrong it reads as an observation; a lost
    sandbox ends the episode with `error_kind` `sandbox_lost`, and every later step says so until
    `reset`.

    The sandbox gives no reward: a step earns 0.0 with `info["reward_missing"]`. Reward the whole in
    an `evaluate` of a subclass (a rollout's reward is then that), or single steps by setting
    `reward` on the result in a `step` of a subclass, or by a handler that returns a `StepResult`.

    Not picklable, and not usable in a process forked from one that had used the SDK; used by one
    caller at a time, `close` from any thread. The async twins run in threads, which for this SDK is
    as fast as its own async client. A command holds a connection, of which the SDK opens 200 per
    server: 180 commands run at once, further ones wait for a place without using up their time
    limit (`E2B_MAX_CONNECTIONS`, set before the trainer starts, changes that). A proxy of the
    environment applies to every address that `NO_PROXY` does not list, loopback included.

    Args:
        template: Name or id of the template, built on the server beforehand; a snapshot's id too.
        api_url: Base URL of the server or gateway; by default `E2B_API_URL`. Sandboxes are reached
            through it too unless `sandbox_url` says otherwise.
        api_key: By default `E2B_API_KEY`, then `"dummy"`.
        sandbox_timeout: Seconds the sandbox may be idle before `on_timeout` happens to it; give
            more than the model may think between two steps.
        command_timeout: Seconds one command may take, setup commands too. Then it is killed
            together with what it started, and what it printed is kept.
        setup_commands: Run in order after each `reset`; their joined output is its observation.
        sandbox_envs: Environment variables of everything in the sandbox.
        metadata: Labels of the sandbox, visible in listings; keys beginning with `twinkle-` are
            taken.
        refresh_timeout: Start the idle time anew with every step, a failing one too, and keep the
            sandbox at least as long as a running command. What it has is never shortened.
        include_default_tools: Offer `run_command`, `write_file` and `read_file`.
        sandbox_url: Base URL of requests to sandboxes; by default `E2B_SANDBOX_URL`, then
            `api_url`.
        on_timeout: `pause` keeps an idle sandbox and resumes it on access, `kill` leaves nothing
            behind.
        setup_errors: A setup command that fails kills the sandbox and `reset` raises; with
            `observe` it is part of the observation.
        run: Label that `twinkle-rollout sweep --run` finds the sandboxes of a run by; by default
            `TWINKLE_RUN`, then one per process.
        pool: Where ready sandboxes may be had; the pool starts one where it has none.
        capacity_timeout_s: Seconds `reset` waits for room on the server; 0 refuses at once.
        ready_timeout_s: Seconds a new sandbox may take to answer its first request.
        max_concurrent_creates: Sandboxes the whole process starts at once on this server.
        queue_timeout_s: Seconds to wait for a place among them, or among the running commands.
        request_timeout: Seconds any single request may take; commands have their own limit.
        connection_options: Further connection options of the SDK: `proxy`, `http_version`,
            `domain`, `api_headers`.
        create_options: Further arguments of the SDK's `Sandbox.create`, such as `network`.
        code_interpreter: Also offer `run_code`: Python whose names stay from call to call. Needs
            the extra `code-interpreter`, and a template with E2B's code interpreter.

    Raises:
        ModuleNotFoundError: `code_interpreter` without its extra.
        TypeError: An argument has the wrong type.
        ValueError: An argument has an impossible value.

    Example:
        ```python
        env = AgentEnv(template="my-env", api_url="http://127.0.0.1:8800")
        env.reset()
        env.step("run_command", {"command": "echo hello"}).observation  # 'hello'
        env.close()
        ```
    """

    def __init__(
        self,
        template: str,
        api_url: str | None = None,
        api_key: str | None = None,
        sandbox_timeout: float = 300,
        command_timeout: float = 120,
        setup_commands: Sequence[str] | None = None,
        sandbox_envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        refresh_timeout: bool = True,
        include_default_tools: bool = True,
        *,
        sandbox_url: str | None = None,
        on_timeout: OnTimeout = "pause",
        setup_errors: SetupErrors = "raise",
        run: str | None = None,
        pool: SandboxPool | None = None,
        capacity_timeout_s: float = 30.0,
        ready_timeout_s: float = 15.0,
        max_concurrent_creates: int = 32,
        queue_timeout_s: float = 600.0,
        request_timeout: float = 60.0,
        connection_options: Mapping[str, Any] | None = None,
        create_options: Mapping[str, Any] | None = None,
        code_interpreter: bool = False,
    ) -> None:
        if isinstance(setup_commands, (str, bytes)):
            raise TypeError(f"setup_commands must be a list of commands, found {setup_commands!r}")
        self.include_default_tools = include_default_tools
        self.refresh_timeout = refresh_timeout
        self._spec = SandboxSpec(
            connection=Connection.resolve(
                api_url=api_url,
                api_key=api_key,
                sandbox_url=sandbox_url,
                request_timeout=request_timeout,
                options=connection_options,
            ),
            template=template,
            run=run or labels.default_run(),
            sandbox_timeout_s=sandbox_timeout,
            command_timeout_s=command_timeout,
            on_timeout=on_timeout,
            envs=dict(sandbox_envs or {}),
            metadata=dict(metadata or {}),
            setup_commands=tuple(setup_commands or ()),
            setup_errors=setup_errors,
            capacity_timeout_s=capacity_timeout_s,
            ready_timeout_s=ready_timeout_s,
            max_concurrent_creates=max_concurrent_creates,
            queue_timeout_s=queue_timeout_s,
            create_options=dict(create_options or {}),
            code_interpreter=code_interpreter,
        )
        if code_interpreter and importlib.util.find_spec("e2b_code_interpreter") is None:
            raise ModuleNotFoundError(
                "code_interpreter=True needs the e2b-code-interpreter distribution, which is not "
                "installed: run `pip install twinkle-envs-agentenv[code-interpreter]`"
            )
        self._pool = pool
        self._custom: dict[str, tuple[ToolInfo, ToolHandler]] = {}
        self._slot = SandboxSlot(self)

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
        handle = self._slot.handle
        if handle is None:
            return None
        check_process()
        return handle.sandbox

    @property
    def sandbox_id(self) -> str | None:
        """The id of the running sandbox; `None` before `reset` and after `close`."""
        handle = self._slot.handle
        return None if handle is None else handle.sandbox_id

    def register_tool(self, tool_info: ToolInfo, handler: ToolHandler) -> Self:
        """Add a tool that runs in this process.

        Args:
            tool_info: Its definition; a tool of that name, built in or registered, is replaced.
            handler: `handler(env, arguments)`. What it returns becomes the observation (a
                `StepResult` is taken as it is, so a handler may give a reward or end the episode);
                what it raises is an observation too.

        Returns:
            This env, for the next registration.

        Raises:
            ValueError: The definition has no name.
        """
        name: Any = tool_info.get("function", {}).get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool_info must have a function.name, found {tool_info!r}")
        self._custom.pop(name, None)
        self._custom[name] = (tool_info, handler)
        return self

    def register_command_tool(
        self,
        tool_info: ToolInfo,
        command_template: str,
        *,
        quote: bool = True,
        timeout_s: float | None = None,
    ) -> Self:
        """Add a tool that is a shell command with places for its arguments.

        Args:
            tool_info: Its definition.
            command_template: The command, with `{argument}` for each argument and `{{` for a brace.
                Values are quoted for the shell, so they arrive verbatim whatever they hold.
            quote: False puts them in as they are.
            timeout_s: Seconds it may take; by default `command_timeout`.

        Returns:
            This env, for the next registration.

        Raises:
            ValueError: The template is faulty (`CommandTemplate.parse`), or the definition has no
                name.
        """
        template = CommandTemplate.parse(command_template, tool_info, quote=quote)

        def handler(env: AgentEnv, arguments: dict[str, Any]) -> str:
            return env.run_command({"command": template.fill(arguments), "timeout": timeout_s})

        return self.register_tool(tool_info, handler)

    def tools(self) -> list[ToolInfo]:
        """Return the definitions of the tools a model may call."""
        return [copy.deepcopy(info) for info, _ in self._offered().values()]

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Kill the sandbox of the last episode and start a new one.

        The first `reset` of a forked env keeps the sandbox it was made with.

        Args:
            trajectory: Its `user_data` may hold an `episode_id`, which becomes a label.

        Returns:
            The joined output of the setup commands, at most 32,768 characters of it.

        Raises:
            SandboxUnavailableError: No sandbox could be started: no room, no server.
            SandboxRefusedError: The server refuses: the key, the template, its version.
            SandboxSetupError: A setup command failed.
            SandboxError: The sandbox was lost during its setup, or `close` was called meanwhile.
        """
        from twinkle_agentic.envs.agentenv._retry import check_alive

        handle = self._slot.handle
        if handle is not None and handle.prepared:
            handle.prepared = False
            handle.use(check_alive, "it was to be handed over")
            return _first_result(handle)
        generation = self._slot.empty()
        try:
            return _first_result(interruptible(self._start, trajectory, generation))
        except BaseException:
            self._slot.empty()  # an interrupted start goes on, and kills what comes of it
            raise

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        """Run one tool; never raises.

        Args:
            tool_name: A name from `tools()`.
            arguments: Its arguments. Those of `run_command` may hold a `timeout` in seconds, at
                most `command_timeout`. A default tool refuses an argument that it does not take.

        Returns:
            At most 32,768 characters of observation, head and tail, and a reward of 0.0 with
            `info["reward_missing"]` where no handler gave one. `info` holds `sandbox_id`; of a
            command `exit_code` (and `timed_out`); `refresh_error` where the idle time could not be
            started anew. A command that fails or takes too long is no error; a tool that could not
            do its work is one, with `done=False`; a sandbox that was lost, or does not answer
            though the server says it runs, ends the episode.
        """
        handle = self._slot.handle
        if handle is None:
            return StepResult.failed("there is no sandbox: call reset() first", kind=ErrorKind.ENV)
        if handle.failure is not None:
            return StepResult.failed(handle.failure, sandbox_id=handle.sandbox_id)
        handle.prepared = False
        try:
            result = self._run_tool(tool_name, arguments)
        except CommandBrokenError as broken:
            seen = f"{broken.output}\nError: {broken}".lstrip("\n")
            result = StepResult.failed(broken, done=False, observation=seen)
        except TwinkleEnvError as error:
            ends = isinstance(error, (SandboxRefusedError, SandboxLostError))
            result = StepResult.failed(error, done=ends)
        except ToolFaultError as fault:
            result = StepResult.failed(str(fault), kind=ErrorKind.TOOL, done=False)
        except (Exception, SystemExit) as error:  # of a handler
            _look_for_loss(handle, error)
            result = StepResult.failed(error, kind=ErrorKind.TOOL, done=False)
        _count_failure(handle, result)
        details: dict[str, Any] = {"sandbox_id": handle.sandbox_id}
        if handle.failure is not None:
            return StepResult.failed(handle.failure, **details)
        if self.refresh_timeout and not result.done:
            refresh_error = handle.renew()
            if refresh_error is not None:
                details["refresh_error"] = refresh_error
        return replace(result, info={**details, **result.info})

    def close(self) -> None:
        """Kill the sandbox, from any thread; calling it again does nothing."""
        self._slot.empty()

    def run_command(self, arguments: Mapping[str, Any]) -> str:
        """Run a command as the tool `run_command` does, for handlers.

        Args:
            arguments: `command`, and optionally `cwd` and `timeout` (seconds, by default
                `command_timeout`).

        Returns:
            What it printed; standard error, a non-zero exit code and a timeout follow as marked
            parts. At most 32,768 characters. It is a `CommandOutput`: a `str` with `exit_code` and
            `timed_out`, which `step` reports in `info` where a handler returns it.

        Raises:
            ToolFaultError: There is no command, or it cannot be started.
            SandboxError: The sandbox is lost or failed.
            EnvTimeoutError: The sandbox does not answer.
        """
        command = text_argument(arguments, "command")
        cwd = text_argument(arguments, "cwd", optional=True) or None
        return self._run(command, arguments.get("timeout"), cwd=cwd).output()

    def run_code(self, code: str) -> StepResult:
        """Run Python in the sandbox's code interpreter, after what it has run before.

        It may take `command_timeout`; then it is interrupted, and killed with its names where it
        goes on.

        Returns:
            What it printed, its results, and its traceback where it failed, at most 32,768
            characters; no reward. `info` has `images` (PNG or JPEG, at most 8), `code_error` (the
            name of the exception) and `timed_out`, each where there is one.

        Raises:
            ToolFaultError: It is refused.
            SandboxError: The sandbox is lost or failed, there is none, or the env was made without
                `code_interpreter`.
            EnvTimeoutError: The sandbox does not answer.
        """
        if not self._spec.code_interpreter:
            raise SandboxError("run_code needs AgentEnv(code_interpreter=True)")
        from twinkle_agentic.envs.agentenv._code import run_code

        handle = self._handle()
        limit_s = self._spec.command_timeout_s
        return handle.use(run_code, code, timeout_s=limit_s, outlasted=self.refresh_timeout)

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
        return self._run(
            command, timeout_s, cwd=cwd, envs=envs, user=user, max_chars=_EXEC_CHARS
        ).result()

    def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file, its directories too; an existing one is replaced.

        Raises:
            ToolFaultError: The path cannot be written, or the disk is full.
            SandboxError: The sandbox is lost or failed, or there is none.
            EnvTimeoutError: No answer within `request_timeout`.
        """
        data = clean_text(content).encode() if isinstance(content, str) else content
        from twinkle_agentic.envs.agentenv._files import write_bytes

        handle = self._handle()
        handle.use(write_bytes, path, data)

    def read_file(self, path: str) -> bytes:
        """Read a file of at most 64 MiB.

        Raises:
            ToolFaultError: There is no such file, or it is longer.
            SandboxError: The sandbox is lost or failed, or there is none.
            EnvTimeoutError: No answer within `request_timeout`.
        """
        from twinkle_agentic.envs.agentenv._files import read_bytes

        handle = self._handle()
        return handle.use(read_bytes, path)

    def snapshot(self, name: str | None = None) -> str:
        """Keep the state of the sandbox as a template of its own.

        Returns:
            Its id, for the `template` of other envs; it stays on the server until
            `delete_snapshot`.

        Raises:
            SandboxError: The sandbox is lost, there is none, or the server makes no snapshot of it.
        """
        from twinkle_agentic.envs.agentenv._create import take_snapshot

        handle = self._handle()
        return handle.use(take_snapshot, name)

    def delete_snapshot(self, snapshot_id: str) -> bool:
        """Delete a snapshot from the server; return whether there was one.

        Raises:
            SandboxError: The server does not delete it.
        """
        from twinkle_agentic.envs.agentenv._create import delete_snapshot

        return interruptible(delete_snapshot, self._spec, snapshot_id)

    def fork(self, n: int = 1) -> list[Self]:
        """Make `n` envs whose sandboxes start as copies of this one, for a group of trajectories.

        Each is ready to be stepped; its first `reset` keeps the copy (with this env's setup output
        as the observation), a later one starts from the template. Tools are taken over. Each is
        closed on its own.

        Args:
            n: How many (>= 1).

        Raises:
            ValueError: `n` is below 1.
            SandboxError: The sandbox is lost or there is none.
            SandboxUnavailableError: The server does not make all of them in time; those it made are
                killed.
        """
        if n < 1:
            raise ValueError(f"fork needs n >= 1, found {n!r}")
        from twinkle_agentic.envs.agentenv._create import fork_sandbox

        handle = self._handle()
        twins: list[Self] = []
        for child in handle.use(fork_sandbox, n):
            twin = copy.copy(self)
            twin._custom = dict(self._custom)
            twin._slot = SandboxSlot(twin, child)
            twins.append(twin)
        return twins

    def _start(self, trajectory: Trajectory | None, generation: int) -> SandboxHandle:
        handle = self._new_handle(trajectory)
        if not self._slot.fill(handle, generation):
            handle.kill()
            raise SandboxError("the env was closed while its sandbox started", retryable=True)
        return handle

    def _new_handle(self, trajectory: Trajectory | None) -> SandboxHandle:
        from twinkle_agentic.envs.agentenv._create import start_sandbox

        if self._pool is not None:
            return self._pool.acquire(self._spec)
        try:
            episode = user_data_get(trajectory, "episode_id")
        except ValueError as error:
            raise SandboxError(f"the trajectory cannot be read: {error}") from error
        extra = {} if episode is None else {labels.EPISODE: clean_text(str(episode))}
        return start_sandbox(self._spec, extra_labels=extra)

    def _handle(self) -> SandboxHandle:
        handle = self._slot.handle
        if handle is None:
            raise SandboxError("there is no sandbox: call reset() first")
        return handle

    def _run(self, command: str, timeout_s: object, **options: Any) -> CommandRun:
        limit_s = self._spec.command_timeout_s if timeout_s is None else seconds_argument(timeout_s)
        from twinkle_agentic.envs.agentenv._commands import run_command

        handle = self._handle()
        return handle.use(
            run_command, command, timeout_s=limit_s, outlasted=self.refresh_timeout, **options
        )

    def _offered(self) -> dict[str, tuple[ToolInfo, ToolHandler]]:
        """Return definition and handler of each tool, the built-in ones first."""
        built_in = DEFAULT_TOOLS if self.include_default_tools else {}
        if self._spec.code_interpreter:
            built_in = built_in | CODE_TOOLS
        return {
            **{name: tool for name, tool in built_in.items() if name not in self._custom},
            **self._custom,
        }

    def _run_tool(self, tool_name: str, arguments: dict[str, Any] | None) -> StepResult:
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ToolFaultError(
                f"the arguments of {tool_name!r} must be an object, found "
                f"{type(arguments).__name__}"
            )
        tools = self._offered()
        if tool_name not in tools:
            raise ToolFaultError(
                f"unknown tool {tool_name!r}: available are {', '.join(tools) or '(none)'}"
            )
        answer = tools[tool_name][1](self, arguments)
        result = answer if isinstance(answer, StepResult) else StepResult.scored(answer, None)
        seen: object = result.observation
        if isinstance(seen, CommandOutput):
            info: dict[str, Any] = {"exit_code": seen.exit_code}
            if seen.timed_out:
                info["timed_out"] = True
            info |= result.info
            return replace(result, observation=str(seen), info=info)
        return replace(result, observation=to_text(seen))


def _first_result(handle: SandboxHandle) -> StepResult:
    return StepResult(observation=handle.setup_output, info={"sandbox_id": handle.sandbox_id})


def _look_for_loss(handle: SandboxHandle, error: BaseException) -> None:
    """Find out whether a handler that used the SDK failed because the sandbox is lost."""
    from twinkle_agentic.envs.agentenv._retry import check_alive
    from twinkle_agentic.envs.agentenv._sdk_errors import comes_from_sdk, read_failure

    if comes_from_sdk(error):
        with contextlib.suppress(SandboxError):  # lost, which is recorded, or it cannot be asked
            handle.use(check_alive, read_failure(error).words)


def _count_failure(handle: SandboxHandle, result: StepResult) -> None:
    """Give a sandbox up that fails again and again: what its episode earns says nothing."""
    if result.info.get("error_kind") in (None, ErrorKind.TOOL):
        handle.failures_in_row = 0
        return
    handle.failures_in_row += 1
    if handle.failures_in_row >= _MAX_FAILURES and handle.failure is None:
        handle.failure = SandboxLostError(
            f"sandbox {handle.sandbox_id} is given up after {handle.failures_in_row} failures in a "
            f"row (the last: {result.error}); call reset() for a new one"
        )
