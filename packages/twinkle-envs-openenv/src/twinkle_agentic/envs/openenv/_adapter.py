"""What the two adapters, over a websocket and in process, have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, cast

from twinkle_agentic._aio.limits import check_count
from twinkle_agentic.envs.base import Env, StepResult
from twinkle_agentic.envs.errors import ErrorKind
from twinkle_agentic.envs.openenv._episode import Episode
from twinkle_agentic.envs.openenv._guide import environment_line, how_to_act
from twinkle_agentic.envs.openenv._rendering import Guide, Renderer, mcp_error
from twinkle_agentic.envs.openenv._tool_schemas import tool_name as name_of
from twinkle_agentic.tools.text import to_text, truncate_middle
from twinkle_agentic.tools.types import ToolInfo

__all__ = ["ActionMapper", "Adapter", "Handler", "require_one_name"]

ActionMapper = Callable[[str, dict[str, Any]], Any]
"""`(tool_name, arguments) -> action`, an Action or a dict of its fields."""

Handler = Callable[[Any, dict[str, Any]], Any]
"""`handler(env, arguments)`: its result, as text, is the observation."""


class Adapter(Env):
    """An `Env` around an OpenEnv environment: tools of its own, one episode, rendered observations.

    Attributes:
        reset_kwargs: For the environment's `reset`; may be changed between episodes.
    """

    def __init__(
        self,
        *,
        action_mapper: ActionMapper | None,
        reset_kwargs: Mapping[str, Any] | None,
        observation_renderer: Callable[[Any], str] | None,
        observation_fields: Iterable[str] | None,
        hide_fields: Iterable[str],
        about: str | None,
        env: str | type | None,
        max_observation_chars: int | None,
        reset_keys: Iterable[str] | None,
        strict_reset: bool,
        unstarted: ErrorKind,
    ) -> None:
        check_count("max_observation_chars", max_observation_chars, allow_none=True)
        self.reset_kwargs: dict[str, Any] = dict(reset_kwargs or {})
        self._action_mapper = action_mapper
        self._own_renderer = observation_renderer
        self._hide = frozenset(hide_fields)
        self._renderer = Renderer(only=_names(observation_fields), hide=self._hide)
        self._about = environment_line(env) if about is None else about
        self._max_chars = max_observation_chars
        self._reset_keys = None if reset_keys is None else list(reset_keys)
        self._strict_reset = strict_reset
        self._local: dict[str, tuple[ToolInfo, Handler]] = {}  # tools that run here
        self._episode = Episode(lost_kind=unstarted)
        self._last_result: Any = None

    def register_tool(self, tool_info: ToolInfo, handler: Handler) -> Self:
        """Add a tool that runs here and never reaches the environment.

        Args:
            tool_info: Its definition; a tool of the same name is overridden.
            handler: `handler(env, arguments)`; its result, as text, is the observation. It may
                return a `StepResult`, whose reward counts, and, on a client, be a coroutine
                function.

        Returns:
            The env itself, for further calls.

        Raises:
            ValueError: The definition has no name.
            TypeError: `handler` cannot be called.
        """
        name = name_of(tool_info)
        if not name:
            raise ValueError(f"tool_info must have function.name, found {tool_info!r}")
        if not callable(handler):
            raise TypeError(f"the handler of {name!r} must be callable, found {handler!r}")
        self._local.pop(name, None)
        self._local[name] = tool_info, handler
        return self

    @property
    def episode_reward(self) -> float:
        """Sum of the rewards of the episode's steps."""
        return self._episode.reward

    @property
    def last_result(self) -> Any:
        """The environment's latest answer, as it is; `None` before the first reset."""
        return self._last_result

    def _checked(
        self, tool_name: str, arguments: Any, *, any_name: bool
    ) -> StepResult | Handler | None:
        """Return the result of a call that must not be made, or the handler that takes it here."""
        if (refusal := self._episode.refusal()) is not None:
            return refusal
        if not isinstance(arguments, dict):
            return self._episode.failed(
                f"the arguments of {tool_name!r} must be an object, found {arguments!r}",
                kind=ErrorKind.TOOL,
            )
        if tool_name in self._local:
            return self._local[tool_name][1]
        if any_name:
            return None
        names = [name_of(tool) for tool in self.tools()]
        if tool_name in names or self._local.keys() >= set(names):
            return None  # without tools of its own the environment takes any name
        return self._episode.failed(
            f"there is no tool {tool_name!r}; the tools are {', '.join(names)}",
            kind=ErrorKind.TOOL,
        )

    def _handled(self, value: Any) -> StepResult:
        """Make a result of what a handler returned."""
        if isinstance(value, StepResult):
            return self._episode.scored(
                value.observation, value.reward, done=value.done, info=dict(value.info)
            )
        return StepResult(
            to_text(value, max_chars=self._max_chars),
            info={"episode_reward": self._episode.reward},
        )

    def _scored(
        self,
        text: str,
        answer: Any,
        *,
        reward: Any,
        done: bool,
        metadata: dict[str, Any],
        images: list[bytes],
    ) -> StepResult:
        """Make the result of a step; `answer` is what the environment said, for its errors."""
        info: dict[str, Any] = {"metadata": metadata}
        if done and (metadata.get("truncated") or _field(answer, "truncated") is True):
            info["truncated"] = True
        if images:
            info["images"] = images
        result = self._episode.scored(text, reward, done=done, info=info)
        error = mcp_error(answer)
        if error is not None and reward is None:
            result.info.update(error=error, error_kind=str(ErrorKind.TOOL), retryable=False)
        return result

    def _not_offered(self, arguments: Mapping[str, Any]) -> str:
        """Return a note on a move that the observation before did not list, or nothing."""
        if self._action_mapper is not None or self._own_renderer is not None:
            return ""  # what was listed is not what the model says, or was not shown
        return self._renderer.not_offered(arguments)

    def _raised(self, said: str, arguments: Mapping[str, Any]) -> StepResult:
        """Make the result of a step in which the environment raised; it may be called again."""
        note = self._not_offered(arguments)
        return self._episode.failed(f"{said} {note}".rstrip(), kind=ErrorKind.TOOL)

    def _rendered(
        self,
        observation: Any,
        fields: Any,
        *,
        meanings: Mapping[str, str] | None = None,
        note: str = "",
    ) -> tuple[str, list[bytes]]:
        """Render an observation, and return the images that the text names.

        Args:
            observation: For the renderer that was given.
            fields: What the built-in rendering looks at.
            meanings: It is that of a reset: what its fields mean.
            note: Said first.
        """
        images: list[bytes] = []
        if self._own_renderer is not None:
            text = to_text(self._own_renderer(observation), max_chars=None)
        else:
            guide = None
            if meanings is not None:
                acting = how_to_act(self._shown_tools())
                guide = Guide(about=self._about, meanings=meanings, acting=acting)
            rendered = self._renderer.render(fields, guide=guide)
            text = "\n".join(part for part in (note, rendered.text) if part)
            images = rendered.images
        if self._max_chars is not None:
            text = truncate_middle(text, self._max_chars)
        return text, images

    def _with_local_tools(self, others: Iterable[ToolInfo]) -> list[ToolInfo]:
        kept = [tool for tool in others if name_of(tool) not in self._local]
        return [*kept, *(tool for tool, _ in self._local.values())]

    def _shown_tools(self) -> list[ToolInfo]:
        """Return the tools of a model that is driven by them."""
        return self.tools()


def _names(names: Iterable[str] | None) -> list[str] | None:
    return None if names is None else list(names)


def _field(observation: Any, name: str) -> Any:
    if isinstance(observation, Mapping):
        return cast("Mapping[str, Any]", observation).get(name)
    return getattr(observation, name, None)


def require_one_name(env_name: str | None, env_cls: object, *, example: str) -> None:
    """Check that an environment is named in one way.

    Raises:
        ValueError: Both are given, or neither.
    """
    if (env_name is None) == (env_cls is None):
        raise ValueError(
            f"give either env_name or env_cls, found env_name={env_name!r} and "
            f"env_cls={env_cls!r}: for example {example}"
        )
