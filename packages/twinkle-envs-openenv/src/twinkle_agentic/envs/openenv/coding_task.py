"""A coding task on an OpenEnv coding server: write code, hand it in, be scored by unit tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import EnvError, ErrorKind, TwinkleEnvError
from twinkle_agentic.envs.openenv.client import OpenEnvClient
from twinkle_agentic.envs.openenv.errors import ActionRefusedError, ServerError
from twinkle_agentic.envs.verdict import CompiledTests, Reason, Verdict, compile_tests
from twinkle_agentic.tools.types import ToolInfo, Trajectory, user_data_dict

__all__ = ["CodingTaskEnv"]

_PROBE = "import os\nos.write(int(os.environ['TWINKLE_REPORT_FD']), b'here')\n"


def _tool(name: str, description: str) -> ToolInfo:
    code = {"type": "string", "description": "Python source code."}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
        },
    }


_TOOLS = [
    _tool("run_python", "Run Python code and see what it prints. Names persist between calls."),
    _tool("submit_solution", "Hand in the solution. It is run against unit tests."),
]


_checked: set[tuple[str, ...]] = set()  # addresses whose server can give a verdict


class CodingTaskEnv(Env):
    """One episode of a coding task, scored by the unit tests in `user_data["tests"]`.

    `run_python` runs code in the episode's session, and has no reward. `submit_solution` runs the
    code and then the tests in an interpreter of their own, which has seen nothing of the episode:
    what the tests are is in `twinkle_agentic.envs.verdict`; what a solution can and cannot forge is
    in decision 0080. All tests pass: reward 1.0 and the end of the episode. Else the model sees
    what failed and may hand in again. `info` of a submission has `passed` (bool), `tests` (names of
    tests by `passed`, `failed`, `errors`) and `reason` (a `Reason`, where it has not passed).

    Tests that are at fault give no reward: the step's is missing, and `evaluate` raises with what
    is wrong with them.

    `user_data` may have `provides`: names the solution is asked to define though they are
    builtins. `seed` and `episode_id` go to the server's `reset`; other keys only where
    `reset_keys` names them.

    Args:
        base_url: The coding server, or several. It must run `twinkle-openenv-server`.
        env_name: Its package.
        partial: Give for each submission the part of the tests that pass, as far as it is more than
            that of the earlier ones: the return is the best part.
        timeout_s: Seconds a solution has with its tests; the server may allow less.
        **client_options: As for `OpenEnvClient`.

    Example:
        >>> task = {"user_data": {"tests": "assert add(2, 3) == 5"}}
        >>> with CodingTaskEnv("http://127.0.0.1:8000") as env:
        ...     env.reset(task)
        ...     env.step("submit_solution", {"code": "def add(a, b): return a + b"}).reward
        1.0
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        env_name: str = "coding_env",
        partial: bool = False,
        timeout_s: float = 30.0,
        **client_options: Any,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, found {timeout_s!r}")
        # A coding server refuses labels of the task that it does not know.
        client_options.setdefault("reset_keys", ())
        self.client = OpenEnvClient(env_name=env_name, base_url=base_url, **client_options)
        self.partial = partial
        self.timeout_s = timeout_s
        self._tests: CompiledTests | None = None
        self._best = 0.0
        self._not_scored: str | None = None  # why the latest solution could not be scored
        self._servers = (base_url,) if isinstance(base_url, str) else tuple(base_url)

    def tools(self) -> list[ToolInfo]:
        """Return `run_python` and `submit_solution`."""
        return _TOOLS

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a session, or a new episode in it.

        Raises:
            ValueError: The trajectory's `user_data` has no `tests`, or tests that check nothing
                (`TaskFaultError`, with their line).
            EnvError: The server cannot run a solution in an interpreter of its own.
            TwinkleEnvError: The server gave no episode.
        """
        data = user_data_dict(trajectory)
        tests = data.pop("tests", None)  # the grader's, never the server's business
        provides = data.pop("provides", ())
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError(f"a coding task needs user_data['tests'], found {tests!r}")
        self._tests = compile_tests(
            tests, prompt=_prompt(trajectory), provides=tuple(map(str, provides))
        )
        self._not_scored, self._best = None, 0.0
        await self.client.areset({"user_data": data})
        if self._servers not in _checked:
            await self._check_server()
            _checked.add(self._servers)
        return StepResult()

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Run code, or score it."""
        code = arguments.get("code")
        if tool_name not in ("run_python", "submit_solution") or not isinstance(code, str):
            found = f"{tool_name!r} with {sorted(arguments)}"
            return StepResult(
                f"Error: call run_python or submit_solution with `code`, found {found}"
            )
        if tool_name == "run_python":
            result = await self.client.astep("run_python", {"code": code})
            result.reward = 0.0
            result.info.pop("episode_reward", None)
            return result
        try:
            return self._scored(await self._judge(code))
        except ActionRefusedError as error:  # too large: the model may hand in something else
            return StepResult.failed(error, done=False)
        except ServerError as error:  # what a solution does wrong is a report, never an error
            return StepResult.failed(error, kind=ErrorKind.SANDBOX_LOST, retryable=True)
        except TwinkleEnvError as error:
            return StepResult.failed(error)

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Add nothing to the reward of the steps.

        Raises:
            EnvError: The latest solution has no score, because the tests are at fault.
        """
        if self._not_scored is not None:
            raise EnvError(f"the task is at fault, so there is no reward: {self._not_scored}")
        return [0.0] * len(trajectories)

    async def aevaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """As `evaluate`."""
        return self.evaluate(trajectories, **kwargs)

    async def _judge(self, code: str) -> Verdict:
        if self._tests is None:
            raise EnvError("there is no task: call reset")
        program, key = self._tests.program(code)
        metadata = await self._run_fresh(program, self.timeout_s)
        report = metadata.get("report")
        if metadata.get("failure") == "too_long":
            text = "the solution is longer than the server takes"
            return Verdict(passed=False, reason=Reason.LIMIT, text=text)
        if not isinstance(report, str):
            raise EnvError(f"the coding server gave no report, only {sorted(metadata)}")
        return self._tests.read_report(report, key, ended=str(metadata.get("failure") or ""))

    async def _run_fresh(self, program: str, timeout_s: float) -> Mapping[str, Any]:
        """Run a program in an interpreter of its own; return what the server says of it."""
        # Fields of the metadata, which the typed client of `coding_env` would drop.
        action = {"code": program, "metadata": {"fresh": True, "timeout_s": timeout_s}}
        answer = await self.client.aexecute_fields(action)
        for place in (answer.get("metadata"), answer.get("observation")):
            if isinstance(place, Mapping):
                found = cast("Mapping[str, Any]", place)
                metadata: Any = found.get("metadata", found)
                if isinstance(metadata, Mapping) and metadata:
                    return cast("Mapping[str, Any]", metadata)
        return {}

    async def _check_server(self) -> None:
        metadata = await self._run_fresh(_PROBE, 10.0)
        if metadata.get("report") != "here":
            raise EnvError(
                f"the coding server at {self.client.url} cannot run a solution in an interpreter "
                "of its own, so its verdict could be forged: start twinkle-openenv-server 0.2 or "
                "newer"
            )

    def _scored(self, verdict: Verdict) -> StepResult:
        info: dict[str, Any] = {"passed": verdict.passed, "tests": verdict.counts()}
        if verdict.reason is not None:
            info["reason"] = str(verdict.reason)
        self._not_scored = verdict.text if verdict.task_fault else None
        if verdict.task_fault:
            return StepResult.scored(f"Error: {verdict.text}", None, info=info)
        reward = float(verdict.passed)
        if self.partial:
            reward = max(verdict.fraction - self._best, 0.0)
            self._best = max(verdict.fraction, self._best)
        text = verdict.text
        observation = text if verdict.passed else f"{text[:1].upper()}{text[1:]}"
        return StepResult(observation, reward, done=verdict.passed, info=info)

    async def aclose(self) -> None:
        """Close the session."""
        await self.client.aclose()

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """As `areset`, from synchronous code."""
        return run_sync(self.areset(trajectory))

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """As `astep`, from synchronous code."""
        return run_sync(self.astep(tool_name, arguments))

    def close(self) -> None:
        """Close the session."""
        self.client.close()


def _prompt(trajectory: Trajectory | None) -> str | None:
    """Return what the model is asked, which names what it must define."""
    messages: Any = (trajectory or {}).get("messages") or []
    texts = [str(message.get("content") or "") for message in messages]
    return "\n".join(texts) or None
