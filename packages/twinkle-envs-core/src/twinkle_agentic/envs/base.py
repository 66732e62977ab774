"""The environment an agent acts on."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, cast

from twinkle_agentic._aio.bounded import finish_async
from twinkle_agentic._aio.threads import run_blocking
from twinkle_agentic.envs.step_result import StepResult, as_step_result
from twinkle_agentic.tools.types import Message, ToolInfo, Trajectory

__all__ = ["Env", "StepResult", "as_step_result", "episode_number", "overrides_evaluate"]


class Env(ABC):
    """One object an agent acts on, one episode at a time: `reset`, `step` until done, `close`.

    A subclass gives `step`, usually `reset` and `tools`, and `close` where it holds a resource. The
    methods are synchronous; each has an async twin (`areset`, `astep`, `aevaluate`, `aclose`) which
    by default runs it in a thread of the running rollout, so a blocking environment is fine. An
    adapter that speaks a network protocol overrides the twins with coroutines. An env is used by
    one caller at a time; it is a context manager, sync and async.

    Example:
        >>> class Echo(Env):
        ...     def step(self, tool_name, arguments):
        ...         return StepResult(arguments["text"], reward=1.0, done=True)
        >>> Echo().step("say", {"text": "hello"}).observation
        'hello'

    Attributes:
        fatal_errors: Exceptions of `step` and `reply` after which the env cannot go on: they end
            the episode without a reward. So do errors of `twinkle_agentic.envs.errors`,
            `TimeoutError`, `ConnectionError` and whatever is no `Exception`. Any other exception is
            a failed step: the model sees `Error: ...`, and the episode goes on.
        instant: Whether a step takes microseconds and never waits: an `EnvPool` then runs many such
            envs in one thread.
    """

    fatal_errors: tuple[type[BaseException], ...] = ()
    instant: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("reset", "areset"):
            method = getattr(cls, name)  # its own, or one inherited from a mixin
            if inspect.isfunction(method) and not hasattr(method, "_counts_episodes"):
                setattr(cls, name, _counted(method))

    def reset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode.

        Args:
            trajectory: The one about to be rolled out; its `user_data` may hold `seed`,
                `episode_id` and whatever else the environment takes.

        Returns:
            The first observation; empty by default.

        Raises:
            TwinkleEnvError: No episode could be started.
        """
        return StepResult()

    @abstractmethod
    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Run one action.

        Args:
            tool_name: A name from `tools()`; anything else is an observation of the error.
            arguments: The action's arguments, JSON values.

        Returns:
            Observation, reward, done. A step that failed says so in `info["error"]`.
        """

    def tools(self) -> list[ToolInfo]:
        """Return the definitions of the actions; empty where there is only one, untyped."""
        return []

    def reply(self, message: Message) -> StepResult | None:
        """Answer a message of the model that calls no tool.

        For environments that are played in text, user simulators, or a second chance.

        Args:
            message: The assistant message; its `content` is the text.

        Returns:
            A step: its observation becomes the next user message, its reward and `done` count.
            `None` (the default) ends the episode.
        """
        return None

    def action_tool(self) -> ToolInfo | None:
        """Return the definition of the only action of an env without `tools()`, where it is known.

        `EnvTool.from_env` shows it to the model; by default its arguments are any object.
        """
        return None

    def evaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories, one reward each, in order; zeros by default."""
        return [0.0] * len(trajectories)

    def close(self) -> None:
        """Release everything the env holds; calling it again does nothing."""
        return None

    async def aacquire(self) -> None:
        """Wait for what `reset` needs and other episodes hold, such as a slot of a pool.

        A rollout awaits it before `areset`, and counts the wait against none of the limits of the
        episode: it has a limit of its own. Does nothing by default, and where it is held already.

        Raises:
            TwinkleEnvError: It was not to be had in time.
        """
        return None

    async def areset(self, trajectory: Trajectory | None = None) -> StepResult:
        """Start a new episode without blocking the event loop; as `reset`."""
        return await run_blocking(self.reset, trajectory)

    async def astep(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        """Run one action without blocking the event loop; as `step`."""
        return await run_blocking(self.step, tool_name, arguments)

    async def areply(self, message: Message) -> StepResult | None:
        """Answer a message that calls no tool without blocking the event loop; as `reply`."""
        if type(self).reply is Env.reply:
            return None
        return await run_blocking(self.reply, message)

    async def aevaluate(self, trajectories: Sequence[Trajectory], **kwargs: Any) -> list[float]:
        """Score finished trajectories without blocking the event loop; as `evaluate`."""
        return await run_blocking(self.evaluate, trajectories, **kwargs)

    async def aclose(self) -> None:
        """Release everything without blocking the event loop; as `close`."""
        # A `close` that is a coroutine function after all must release what it holds, too.
        await finish_async(run_blocking(self.close))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def episode_number(env: Any) -> int:
    """Return the number of the episode of an env; it changes with each `reset` or `areset`.

    It is always 0 for an object that is no `Env`.
    """
    return getattr(env, "_episode_number", 0)


def overrides_evaluate(env: Any) -> bool:
    """Tell whether an env scores trajectories itself, not by the zeros of its base class.

    For an `Env` that is any class between it and `Env`, whatever its name. For an env of another
    framework it is any class but the base of that framework.
    """
    cls: Any = cast("type[Any]", type(env))
    if isinstance(env, Env):
        own = (cls.evaluate is not Env.evaluate, cls.aevaluate is not Env.aevaluate)
        return any(own)
    owners = (_owner(cls, "evaluate"), _owner(cls, "aevaluate"))
    return any(owner is not None and not _is_foreign_base(owner, cls) for owner in owners)


def _owner(cls: type[Any], name: str) -> type[Any] | None:
    return next((each for each in cls.__mro__ if name in vars(each)), None)


def _is_foreign_base(owner: type[Any], cls: type[Any]) -> bool:
    """Tell whether a class is where another framework declares what an env is."""
    if getattr(vars(owner).get("step"), "__isabstractmethod__", False):
        return True
    root = all(base.__module__ in ("builtins", "abc", "typing") for base in owner.__mro__[1:])
    return root and owner is not cls and owner.__name__ == "Env"


def _counted(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `reset` count itself, so that the tools of an env notice a new episode."""

    @functools.wraps(reset)
    def counted(self: Env, *args: Any, **kwargs: Any) -> Any:
        object.__setattr__(self, "_episode_number", episode_number(self) + 1)
        return reset(self, *args, **kwargs)

    counted._counts_episodes = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return counted


# The base's own `areset` runs `reset`, which counts.
Env.reset = _counted(Env.reset)
Env.areset._counts_episodes = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
