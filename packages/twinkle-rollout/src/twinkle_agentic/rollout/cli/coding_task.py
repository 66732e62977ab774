"""A coding task on an OpenEnv coding server: write code, hand it in, be scored by unit tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_agentic._aio.loop import run_sync
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import EnvError, TwinkleEnvError
from twinkle_agentic.envs.openenv import ActionRefusedError, OpenEnvClient, ServerError
from twinkle_agentic.tools.types import ToolInfo, Trajectory, user_data_dict

__all__ = ["CodingTaskEnv"]

_SHOWN_ERROR_CHARS = 2_000  # of a failing solution's traceback, its end
_NOT_RUN = "refused"  # what the coding server calls valid Python that its interpreter cannot run


@dataclass(frozen=True, slots=True)
class _Failed:
    """Code that did not run to its end.

    Attributes:
        text: The end of its error.
        not_run: The server's interpreter cannot run such code, so nothing is known of it.
    """

    text: str
    not_run: bool


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


class CodingTaskEnv(Env):
    """One episode of a coding task.

    `run_python` is free of reward: what the server itself gives (shaping by code length and
    forbidden words) says nothing about the task. `submit_solution` runs the code and then the
    tests in the same session: all pass is reward 1.0 and the end of the episode, else the model
    sees the error and may hand in again. A solution (or a test) that the server's interpreter
    cannot run is not wrong for that: the step's reward is missing, and an episode that ends with
    one has no reward.

    Args:
        base_url: The coding server, or several.
        env_name: Its package, `coding_env` by default.
        **client_options: As for `OpenEnvClient`.
    """

    def __init__(
        self, base_url: str | Sequence[str], *, env_name: str = "coding_env", **client_options: Any
    ) -> None:
        self.client = OpenEnvClient(env_name=env_name, base_url=base_url, **client_options)
        self._tests = ""
        self._not_scored: str | None = None  # why the latest solution could not be scored

    def tools(self) -> list[ToolInfo]:
        """Return `run_python` and `submit_solution`."""
        return _TOOLS

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a session, or a new episode in it.

        Raises:
            ValueError: The trajectory's `user_data` has no `tests`.
            TwinkleEnvError: The server gave no episode.
        """
        data = user_data_dict(trajectory)
        tests = data.pop("tests", None)  # the grader's, never the server's business
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError(f"a coding task needs user_data['tests'], found {tests!r}")
        self._tests, self._not_scored = tests, None
        await self.client.areset({"user_data": data})
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
            return await self._score(code)
        except (ActionRefusedError, ServerError) as error:
            # Too large, say, or refused by the server: the model may hand in something else.
            lives = isinstance(error, ActionRefusedError) or error.session_lives
            return StepResult.failed(error, done=not lives)
        except TwinkleEnvError as error:  # the session is gone: our fault, not the solution's
            return StepResult.failed(error)

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Add nothing to the reward of the steps.

        Raises:
            EnvError: The latest solution could not be run, so there is no reward.
        """
        if self._not_scored is not None:
            raise EnvError(
                "the coding server's interpreter cannot run the latest solution or its tests, "
                f"which may be right all the same ({self._not_scored}): score such tasks in a "
                "sandbox"
            )
        return [0.0] * len(trajectories)

    async def aevaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """As `evaluate`."""
        return self.evaluate(trajectories, **kwargs)

    async def _score(self, code: str) -> StepResult:
        for source, said in ((code, "The solution itself fails"), (self._tests, "A test fails")):
            if (failed := await self._run(source)) is not None:
                return self._unsolved(failed, said)
        self._not_scored = None
        return StepResult("All tests pass.", reward=1.0, done=True, info={"passed": True})

    def _unsolved(self, failed: _Failed, said: str) -> StepResult:
        observation, info = f"{said}:\n{failed.text}", {"passed": False}
        self._not_scored = failed.text if failed.not_run else None
        return StepResult.scored(observation, None if failed.not_run else 0.0, info=info)

    async def _run(self, code: str) -> _Failed | None:
        """Run code in the session; return how it failed, `None` where it ran to its end."""
        found: Any = (await self.client.aexecute({"code": code})).observation
        # A dict on the wire, typed where the environment's package is installed.
        fields: dict[str, Any] = dict(found if isinstance(found, Mapping) else vars(found))  # pyright: ignore[reportUnknownArgumentType]
        if fields["exit_code"] == 0:
            return None
        text = str(fields["stderr"]).strip()[-_SHOWN_ERROR_CHARS:] or "it failed without a message"
        metadata: Mapping[str, Any] = fields.get("metadata") or {}
        return _Failed(text, not_run=metadata.get("failure") == _NOT_RUN)

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
