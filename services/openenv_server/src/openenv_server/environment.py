"""The coding environment: one session of the OpenEnv protocol, one interpreter.

Where OpenEnv's `coding_env` package is installed, `CodingEnvironment` is a subclass of its
environment and inherits its rewards; else it is one of `CodingBase`,
whose rewards are all 0.0.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Coroutine
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from openenv_server.coding_types import CodeAction, CodeObservation, CodeState, import_coding_env
from openenv_server.limits import SessionLimits
from openenv_server.openenv_types import Environment
from openenv_server.output import encodable
from openenv_server.session import CodeResult, CodeSession, Sessions
from openenv_server.settings import Settings

__all__ = ["CodingBase", "CodingEnvironment"]

_T = TypeVar("_T")


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


class _FinishedRun:
    """In the place of `coding_env`'s executor: the code has run when its `step` asks for it."""

    def __init__(self, result: CodeResult) -> None:
        self._result = result

    def run(self, code: str) -> CodeResult:
        return self._result


_coding_env = import_coding_env("server.python_codeact_env")
_BASE_NAME = "coding_env" if _coding_env is not None else "openenv_server"
if TYPE_CHECKING:
    _Base = CodingBase
else:
    _Base = CodingBase if _coding_env is None else _coding_env.PythonCodeActEnv


class CodingEnvironment(_Base):
    r"""Runs Python code, step by step, with the names of earlier steps.

    Every environment is an interpreter in a sandbox of its own, made by the first `reset` or
    `step`; `close` ends it. The asynchronous methods belong to one event loop; the others run them
    on a loop of their own, in the background.

    `reset` forgets everything. The episode never ends by itself: `done` is always False. The
    metadata of an observation has `executor` and `base`, `state` (`kept`, or `lost` when the names
    of earlier steps are gone because the interpreter ended), and `failure` when the step failed
    (see `limits.Failure`).

    An action with the metadata `{"fresh": True}` is no step of the episode: its code runs as a
    program in an interpreter and a sandbox of its own. `timeout_s` beside it bounds the time. What
    the program writes to the descriptor whose number is in `TWINKLE_REPORT_FD` comes back in the
    observation's metadata as `report` (text, at most 1 MiB; `report_truncated` when it was more).

    Args:
        limits: Limits of the session; of `sessions` where those are given.
        sessions: Makes the interpreter. Where there are none the environment has its own, which it
            closes.

    Example:
        >>> env = CodingEnvironment()
        >>> _ = env.reset(seed=1)
        >>> env.step(CodeAction(code="print(1 + 1)")).stdout
        '2\n'
        >>> env.close()
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self, limits: SessionLimits | None = None, *, sessions: Sessions | None = None
    ) -> None:
        super().__init__()
        self._sessions = sessions or Sessions(limits or Settings.load().limits)
        self._owns_sessions = sessions is None
        self._session: CodeSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # On the event loop

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **unknown: Any
    ) -> CodeObservation:
        """Start a new episode with no names defined and no files.

        Args:
            seed: Makes `random` in the code repeatable.
            episode_id: Name of the episode; made up when it is not given.
            unknown: Refused, so that a misspelt argument does not go unnoticed.

        Raises:
            ValueError: There is an argument the environment does not know.
            twinkle_isolation.IsolationError: No session can be made.
        """
        if unknown:
            raise ValueError(
                f"the coding environment cannot use {', '.join(sorted(unknown))!r} at reset: "
                "it takes seed and episode_id"
            )
        old, self._session = self._session, None
        if old is not None:
            old.abandon()
        await self._open(seed)
        observation = super().reset()
        if episode_id is not None:
            self._state.episode_id = episode_id
        return self._describe(observation, None)

    async def step_async(
        self, action: CodeAction, timeout_s: float | None = None, **_: Any
    ) -> CodeObservation:
        """Run the code of an action. What it does wrong is an observation with an exit code.

        Args:
            action: The code.
            timeout_s: Not used; see `SessionLimits.step_timeout_s`.

        Raises:
            ValueError: The metadata of the action says what cannot be.
            twinkle_isolation.IsolationError: There is no interpreter; no fault of the code.
        """
        fresh, limit_s = _options(action.metadata)
        if fresh:
            self._loop = asyncio.get_running_loop()
            result = await self._sessions.run_fresh(action.code, timeout_s=limit_s)
            observation = CodeObservation(
                stdout=encodable(result.stdout),
                stderr=encodable(result.stderr),
                exit_code=result.exit_code,
                reward=0.0,
            )
            return self._describe(observation, result)
        session = self._session or await self._open(None)
        result = await session.run(action.code)
        self._executor = _FinishedRun(result)
        return self._describe(super().step(action), result)

    async def close_async(self) -> None:
        """End the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._owns_sessions:
            await self._sessions.close()

    async def _open(self, seed: int | None) -> CodeSession:
        self._loop = asyncio.get_running_loop()
        self._session = await self._sessions.create(seed=seed)
        return self._session

    # From other threads

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **unknown: Any
    ) -> CodeObservation:
        """Do what `reset_async` does, and wait for it."""
        return _wait(self.reset_async(seed, episode_id, **unknown))

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        """Do what `step_async` does, and wait for it."""
        return _wait(self.step_async(action))

    def close(self) -> None:
        """End the session; from any thread but that of its event loop it waits for that."""
        loop, self._loop = self._loop, None
        if loop is None or loop.is_closed():
            return
        closing = asyncio.run_coroutine_threadsafe(self.close_async(), loop)
        if loop is _background_loop():
            closing.result()

    def _describe(self, observation: CodeObservation, result: CodeResult | None) -> CodeObservation:
        metadata = {
            key: value
            for key, value in observation.metadata.items()
            if key != "last_code"  # the whole action again
        }
        metadata |= {"executor": "cpython", "base": _BASE_NAME}
        if result is not None:
            metadata["state"] = result.state
            if result.failure is not None:
                metadata["failure"] = result.failure.value
            if result.report is not None:
                metadata["report"] = encodable(result.report)
            if result.report_truncated:
                metadata["report_truncated"] = True
        observation.metadata = metadata
        return observation


def _options(metadata: dict[str, Any]) -> tuple[bool, float | None]:
    """Read `fresh` and `timeout_s` from an action's metadata."""
    fresh = metadata.get("fresh", False)
    timeout_s = metadata.get("timeout_s")
    if not isinstance(fresh, bool):
        raise ValueError(f"metadata['fresh'] is {fresh!r}: give true or false")
    if timeout_s is None:
        return fresh, None
    if not fresh:
        raise ValueError("metadata['timeout_s'] is given without 'fresh': a step has the server's")
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not math.isfinite(timeout_s) or timeout_s <= 0:
        raise ValueError(
            f"metadata['timeout_s'] is {timeout_s!r}: give a number of seconds above 0"
        )
    return fresh, float(timeout_s)


@lru_cache(maxsize=1)
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coding-environments", daemon=True).start()
    return loop


def _wait(coroutine: Coroutine[Any, Any, _T]) -> _T:
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C: what runs on the loop ends too
        future.cancel()
        raise
