"""One sandbox per episode as an `Env`.

`AgentEnv` holds no connection and no thread: it is a thin client of the `e2b` SDK, which is
imported by the first `reset`. What keeps a sandbox, runs commands in it and tells its failures
apart are the modules beside this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from twinkle_agentic.envs.agentenv import labels
from twinkle_agentic.envs.agentenv.access import SandboxAccess
from twinkle_agentic.envs.agentenv.command_tool import CommandTemplate
from twinkle_agentic.envs.agentenv.connection import Connection
from twinkle_agentic.envs.agentenv.default_tools import (
    DEFAULT_TOOLS,
    refuse_unknown,
    seconds_argument,
    text_argument,
)
from twinkle_agentic.envs.agentenv.errors import (
    CommandBrokenError,
    SandboxRefusedError,
    ToolFaultError,
)
from twinkle_agentic.envs.agentenv.types import OnTimeout, SandboxSpec, SetupErrors
from twinkle_agentic.envs.agentenv.waiting import interruptible
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
    from twinkle_agentic.envs.agentenv.lease import Lease
    from twinkle_agentic.envs.agentenv.pool import SandboxPool

__all__ = ["AgentEnv", "ToolHandler"]

ToolHandler = Callable[["AgentEnv", dict[str, Any]], Any]
"""`handler(env, arguments) -> text` of a registered tool."""

_FORKS_PER_REQUEST = 16  # AgentENV's limit; the SDK's is 20
_PATIENCE = 3  # failures of the sandbox in a row, none of them the model's, that end the episode


class AgentEnv(SandboxAccess, Env):
    """A sandbox of an AgentENV server, or another server that speaks the E2B protocol, per episode.

    `reset` starts a sandbox, `step` runs a tool in it, `close` kills it. It is killed on every
    other path too: a failed setup, an exception, Ctrl-C, an env that is garbage, the exit of the
    interpreter; what a `kill -9` leaves carries labels and goes with `twinkle-rollout sweep`.
    `step` does not raise: what the model did wrong it reads as an observation; a sandbox that is
    gone ends the episode with `error_kind` `sandbox_lost`, and every later step says so until
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

    Raises:
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
    ) -> None:
        spec = SandboxSpec(
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
            setup_commands=_commands(setup_commands),
            setup_errors=setup_errors,
            capacity_timeout_s=capacity_timeout_s,
            ready_timeout_s=ready_timeout_s,
            max_concurrent_creates=max_concurrent_creates,
            queue_timeout_s=queue_timeout_s,
            create_options=dict(create_options or {}),
        )
        spec.check()
        super().__init__(spec, refresh_timeout=refresh_timeout)
        self.include_default_tools = include_default_tools
        self._pool = pool
        self._custom: dict[str, tuple[ToolInfo, ToolHandler]] = {}
        self._prepared = False
        self._failures = 0

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
        offered = dict(DEFAULT_TOOLS) if self.include_default_tools else {}
        for name in self._custom:
            offered.pop(name, None)
        own = [info for info, _ in self._custom.values()]
        return [*copy.deepcopy(list(offered.values())), *own]

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
        from twinkle_agentic.envs.agentenv.recovery import check_alive

        self._notes = {}
        self._failures = 0
        lease = self._hold.lease
        if self._prepared and lease is not None:
            self._prepared = False
            check_alive(lease, "it was to be handed over")
            self._ended = None
            return self._first(lease)
        ticket = self._hold.release()
        self._ended = None
        try:
            return self._first(interruptible(self._start, trajectory, ticket))
        except BaseException:
            self._hold.release()  # an interrupted start goes on, and kills what comes of it
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
            do its work is one, with `done=False`; a sandbox that is gone, or does not answer though
            the server says it runs, ends the episode.
        """
        self._notes = {}
        if self._ended is not None:
            return StepResult.failed(self._ended, sandbox_id=self.sandbox_id)
        if self._hold.lease is None:
            return StepResult.failed("there is no sandbox: call reset() first", kind=ErrorKind.ENV)
        self._prepared = False
        try:
            result = self._run_tool(tool_name, arguments)
        except ToolFaultError as fault:
            result = StepResult.failed(str(fault), kind=ErrorKind.TOOL, done=False)
        except CommandBrokenError as broken:
            seen = f"{broken.output}\nError: {broken}".lstrip("\n")
            result = StepResult.failed(broken, done=False, observation=seen)
        except (SandboxRefusedError, SandboxLostError) as error:  # nothing can go on with it
            result = StepResult.failed(error)
        except TwinkleEnvError as error:
            result = StepResult.failed(error, done=False)
        except SystemExit as error:  # of a handler
            result = StepResult.failed(error, kind=ErrorKind.TOOL, done=False)
        except Exception as error:
            self._look_for_loss(error)
            result = StepResult.failed(error, kind=ErrorKind.TOOL, done=False)
        self._count(result)
        if self._ended is not None:
            result = StepResult.failed(self._ended)
        elif not result.done:
            self._refresh()
        result.info = {"sandbox_id": self.sandbox_id, **self._notes, **result.info}
        return result

    def _count(self, result: StepResult) -> None:
        """End an episode whose sandbox fails again and again: what it earns says nothing."""
        if result.info.get("error_kind") in (None, ErrorKind.TOOL):
            self._failures = 0
            return
        self._failures += 1
        if self._failures >= _PATIENCE and self._ended is None:
            self._ended = SandboxLostError(
                f"sandbox {self.sandbox_id} is given up after {self._failures} failures in a row "
                f"(the last: {result.error}); call reset() for a new one"
            )

    def close(self) -> None:
        """Kill the sandbox, from any thread; calling it again does nothing."""
        self._prepared = False
        self._hold.release()

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
        from twinkle_agentic.envs.agentenv.branching import fork_lease

        if n < 1:
            raise ValueError(f"fork needs n >= 1, found {n!r}")
        with self._watched() as lease:
            leases = fork_lease(lease, n, per_request=_FORKS_PER_REQUEST)
        return [self._twin(child) for child in leases]

    def _twin(self, lease: Lease) -> Self:
        twin = copy.copy(self)
        twin._custom = dict(self._custom)
        twin._notes = {}
        twin._ended = None
        twin._prepared = True
        twin._new_hold()
        twin._hold.take(lease, 0)
        return twin

    def _start(self, trajectory: Trajectory | None, ticket: int) -> Lease:
        lease = self._make(trajectory)
        if not self._hold.take(lease, ticket):
            lease.kill()
            raise SandboxError("the env was closed while its sandbox started", retryable=True)
        return lease

    def _make(self, trajectory: Trajectory | None) -> Lease:
        from twinkle_agentic.envs.agentenv.creating import start_sandbox

        if self._pool is not None:
            return self._pool.acquire(self._spec)
        try:
            episode = user_data_get(trajectory, "episode_id")
        except ValueError as error:
            raise SandboxError(f"the trajectory cannot be read: {error}") from error
        extra = {} if episode is None else {labels.EPISODE: clean_text(str(episode))}
        return start_sandbox(self._spec, extra_labels=extra)

    def _first(self, lease: Lease) -> StepResult:
        return StepResult(observation=lease.setup_output, info={"sandbox_id": lease.sandbox_id})

    def _run_tool(self, tool_name: str, arguments: Any) -> StepResult:
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise ToolFaultError(
                f"the arguments of {tool_name!r} must be an object, found "
                f"{type(arguments).__name__}"
            )
        values = cast("dict[str, Any]", arguments)
        if tool_name in self._custom:
            answer = self._custom[tool_name][1](self, values)
            if isinstance(answer, StepResult):
                answer.observation = to_text(answer.observation)
                return answer
            return StepResult.scored(to_text(answer), None)
        if not self.include_default_tools or tool_name not in DEFAULT_TOOLS:
            names = [info.get("function", {}).get("name", "") for info in self.tools()]
            raise ToolFaultError(
                f"unknown tool {tool_name!r}: available are {', '.join(names) or '(none)'}"
            )
        return StepResult.scored(self._run_default(tool_name, values), None)

    def _run_default(self, tool_name: str, arguments: dict[str, Any]) -> str:
        refuse_unknown(tool_name, arguments)
        if tool_name == "run_command":
            wanted = arguments.get("timeout")
            limit_s = self._spec.command_timeout_s
            if wanted is not None:  # a model may have less time than the user allows, never more
                limit_s = min(limit_s, seconds_argument(wanted))
            return self.run_command({**arguments, "timeout": limit_s})
        path = text_argument(arguments, "path")
        if tool_name == "read_file":
            return to_text(self.read_file(path).decode("utf-8", "replace"))
        content = text_argument(arguments, "content", empty=True)
        self.write_file(path, content)
        return f"Wrote {len(content)} characters to {path}."


def _commands(setup_commands: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(setup_commands, (str, bytes)):
        raise TypeError(f"setup_commands must be a list of commands, found {setup_commands!r}")
    return tuple(setup_commands or ())
