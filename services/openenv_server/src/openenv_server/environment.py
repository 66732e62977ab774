"""The coding environment: one session, one executor.

Where OpenEnv's `coding_env` package is installed, `CodingEnvironment` is a subclass of its
environment and inherits its rewards; else it stands on `CodingBase`, which gives none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from openenv_server.executor import ExecResult, Executor, Failure
from openenv_server.executors import make_executor
from openenv_server.lean import Environment
from openenv_server.memory import WorkerMemoryError
from openenv_server.output import encodable
from openenv_server.settings import Settings
from openenv_server.wire import CodeAction, CodeObservation, CodeState, import_coding_env

__all__ = ["CodingBase", "CodingEnvironment"]


class CodingBase(Environment[CodeAction, CodeObservation, CodeState]):
    """What `coding_env`'s environment does, without its reward: run code, count steps."""

    def __init__(self) -> None:
        super().__init__()
        self._state = CodeState()
        self._executor: Any = None

    def reset(self, *_: Any, **__: Any) -> CodeObservation:
        """Start a new episode."""
        self._state = CodeState(episode_id=str(uuid4()))
        return CodeObservation(reward=0.0)

    def step(self, action: CodeAction, *_: Any, **__: Any) -> CodeObservation:
        """Run the code of an action."""
        result = self._executor.run(action.code)
        self._state.step_count += 1
        self._state.last_exit_code = result.exit_code
        return CodeObservation(
            stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code, reward=0.0
        )

    @property
    def state(self) -> CodeState:
        """Episode id, steps taken, and the exit code of the last one."""
        return self._state


class _Remembering:
    """Keeps the kind of the last failure, for which `coding_env`'s step has no place."""

    def __init__(self, executor: Executor) -> None:
        self._inner = executor
        self.failure: Failure | None = None

    @property
    def name(self) -> str:
        return self._inner.name

    def run(self, code: str) -> ExecResult:
        result = self._inner.run(code)
        self.failure = result.failure
        # What no JSON encoder takes would cost the whole answer of a step that did run.
        return replace(result, stdout=encodable(result.stdout), stderr=encodable(result.stderr))

    def close(self) -> None:
        self._inner.close()


_coding_env = import_coding_env("server.python_codeact_env")
_BASE_NAME = "coding_env" if _coding_env is not None else "openenv_server"
if TYPE_CHECKING:
    _Base = CodingBase
else:
    _Base = CodingBase if _coding_env is None else _coding_env.PythonCodeActEnv


class CodingEnvironment(_Base):
    r"""Runs Python code, step by step, with the names of earlier steps.

    There may be many in one process, each used by one thread at a time. They share its processor
    and memory, and the modules of the library, which code can read and not change (`guard.py`).

    `reset` forgets everything. The episode never ends by itself: `done` is always False. The
    metadata of every observation says which executor ran and, when a step failed, why
    (`executor`, `base`, `failure`, see `executor.Failure`).

    Args:
        settings: Limits and the executor; read from the environment variables when not given.

    Raises:
        SettingsError: An environment variable has a value that cannot be used.

    Example:
        >>> env = CodingEnvironment()
        >>> _ = env.reset(seed=1)
        >>> env.step(CodeAction(code="print(1 + 1)")).stdout
        '2\n'
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self._settings = Settings.load() if settings is None else settings
        self._replace_executor(None)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **unknown: Any
    ) -> CodeObservation:
        """Start a new episode with no names defined.

        Args:
            seed: Makes `random` in the code repeatable.
            episode_id: Name of the episode; made up when it is not given.
            unknown: Refused, so that a misspelt argument does not go unnoticed.

        Raises:
            ValueError: There is an argument the environment does not know.
        """
        if unknown:
            raise ValueError(
                f"the coding environment cannot use {', '.join(sorted(unknown))!r} at reset: "
                "it takes seed and episode_id"
            )
        observation = super().reset()
        self._replace_executor(seed)
        if episode_id is not None:
            self._state.episode_id = episode_id
        return self._describe(observation, failure=None)

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        """Run the code of an action. Its failure is an observation with an exit code.

        Args:
            action: The code.
            timeout_s: Not used; OpenEnv's server never passes it. See `Settings.step_timeout_s`.

        Raises:
            WorkerMemoryError: The worker has reached its memory limit, and it cannot be told that
                this code is to blame. The server answers with an error (`EXECUTION_ERROR`), and
                the session lives, with whatever the code had done by then.
        """
        observation = super().step(action)
        failure = self._executor.failure
        if failure is Failure.WORKER_LIMIT:  # an observation would be scored
            raise WorkerMemoryError(observation.stderr)
        return self._describe(observation, failure=failure)

    def close(self) -> None:
        """Give back what the executor holds."""
        self._executor.close()

    def _replace_executor(self, seed: int | None) -> None:
        old: Any = self._executor
        if isinstance(old, _Remembering):  # else it is `coding_env`'s own, which has no close
            old.close()
        # `coding_env` reads stdout, stderr and exit_code from what `run` gives, as an ExecResult.
        self._executor = _Remembering(make_executor(self._settings, seed))

    def _describe(self, observation: CodeObservation, failure: Failure | None) -> CodeObservation:
        metadata = {
            key: value
            for key, value in observation.metadata.items()
            if key != "last_code"  # the whole action again
        }
        metadata |= {"executor": self._executor.name, "base": _BASE_NAME}
        if failure is not None:
            metadata["failure"] = failure.value
        observation.metadata = metadata
        return observation
