"""The result of a step, and what turns anybody's result into one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.envs.errors import ErrorKind, TwinkleEnvError
from twinkle_agentic.tools._outcome import describe_error
from twinkle_agentic.tools.text import clean_text, to_text

__all__ = ["StepResult", "as_step_result"]

_INFO_TYPES = (
    ("error", (str, type(None))),
    ("error_kind", (str, type(None))),
    ("retryable", (bool, type(None))),
    ("reward_missing", (bool, type(None))),
    ("truncated", (bool, type(None))),
)
_INFO_NAMES = frozenset(name for name, _ in _INFO_TYPES)


@dataclass
class StepResult:
    """What the environment answered to a reset or a step.

    Attributes:
        observation: Text the model sees next.
        reward: Of this step, in the environment's own unit; 0.0 with `info["reward_missing"]` where
            the environment gave none. Setting it on a result says that there is one: the flag goes
            from `info`.
        done: The episode is over: terminated, truncated or lost; `info` says which.
        info: Anything else. Keys with a fixed meaning: `truncated` (bool: with `done`, a limit of
            the environment cut the episode), `episode_reward` (float, the return so far),
            `error` (non-empty text: this step failed and its reward means nothing), `error_kind`
            (an `ErrorKind` value), `retryable` (bool), `reward_missing` (bool), `metadata` (dict),
            `images`: list of PNG/JPEG bytes, which the observation names as `[image 1: ...]`.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def __init__(
        self,
        observation: str = "",
        reward: float = 0.0,
        done: bool = False,
        info: dict[str, Any] | None = None,
    ) -> None:
        values = self.__dict__  # a fifth of the time that `__setattr__` would take
        values["observation"], values["reward"] = observation, reward
        values["done"], values["info"] = done, {} if info is None else info

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name != "reward":
            return
        # A subclass or wrapper that rewards what its inner env did not need not know of the flag,
        # which would make the reward count for nothing.
        info: Any = self.__dict__.get("info")  # not there while a subclass makes the result
        if isinstance(info, dict) and "reward_missing" in info:
            # A new dict: copies of a result share theirs.
            kept = cast("dict[str, Any]", info).items()
            self.info = {key: known for key, known in kept if key != "reward_missing"}

    def __str__(self) -> str:
        return self.observation

    @property
    def truncated(self) -> bool:
        """Whether a limit of the environment ended the episode, not an outcome."""
        return self.done and bool(self.info.get("truncated"))

    @property
    def error(self) -> str | None:
        """The error text of a failed step, `None` of one that worked."""
        return self.info.get("error") or None

    @classmethod
    def failed(
        cls,
        error: BaseException | str,
        *,
        kind: ErrorKind | str | None = None,
        done: bool = True,
        retryable: bool | None = None,
        observation: str | None = None,
        **info: Any,
    ) -> StepResult:
        """Make the result of a step that failed.

        Args:
            error: The exception, or the text.
            kind: The class of the failure; by default the exception's own `kind`, else `env`.
            done: True where the episode is gone, False where it goes on.
            retryable: Whether a new episode may well succeed; by default the exception's own.
            observation: What the model sees; by default `Error: <text>`.
            **info: Further keys of `info`.
        """
        if isinstance(error, TwinkleEnvError):
            kind = error.kind if kind is None else kind
            retryable = error.retryable if retryable is None else retryable
        text = _error_text(error)
        return cls(
            observation=f"Error: {text}" if observation is None else observation,
            reward=0.0,
            done=bool(done),
            info={
                "error": text,
                "error_kind": str(ErrorKind.ENV if kind is None else kind),
                "retryable": bool(retryable),
                **info,
            },
        )

    @classmethod
    def scored(
        cls,
        observation: str,
        reward: Any,
        *,
        done: bool = False,
        info: dict[str, Any] | None = None,
    ) -> StepResult:
        """Make a result from a reward of any origin, so that no wrong number passes as one.

        Args:
            observation: Text the model sees next.
            reward: A number (numpy scalars, decimals and booleans too); `None` becomes 0.0 with
                `info["reward_missing"]`. NaN, infinities, text that looks like a number and
                everything else make the step a failed one (`error_kind` `env`), still with the
                observation.
            done: The episode is over.
            info: Further keys; an `error` among them is kept, a `reward_missing` is not.
        """
        details = dict(info or {})
        if reward is None:
            return cls(observation, 0.0, bool(done), {**details, "reward_missing": True})
        details.pop("reward_missing", None)
        number = _finite_number(reward)
        if number is None:
            return cls(observation, 0.0, bool(done), _bad_number("reward", reward, details))
        return cls(observation, number, bool(done), details)


def as_step_result(value: Any) -> StepResult:
    """Put right what somebody's env returned from `reset` or `step`.

    Args:
        value: A `StepResult`, or another framework's object with the same attributes.

    Returns:
        `value` itself where it is sound. Else a `StepResult` whose observation is text, whose
        reward is a finite number (`StepResult.scored`; one that is not 0 is not missing, whatever
        `info` says), whose `info["episode_reward"]` is one or absent, and whose other keys of a
        fixed meaning have the types that `StepResult` names. What is no result at all is a failed
        step that ends the episode.
    """
    if not isinstance(value, StepResult):
        if isinstance(value, type) or not hasattr(value, "observation"):
            return _no_result(value)
    elif (
        type(value.observation) is str
        and type(value.reward) is float
        and math.isfinite(value.reward)
        and type(value.done) is bool
        and type(value.info) is dict
        and type(value.info.get("episode_reward", 0.0)) is float
        and math.isfinite(value.info.get("episode_reward", 0.0))
        and _has_info_types(value.info)
        and not (value.reward and value.info.get("reward_missing"))
        and clean_text(value.observation) is value.observation
    ):
        return value
    given: Any = getattr(value, "info", None)
    info = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {}
    if "episode_reward" in info:
        episode_reward = info.pop("episode_reward")
        number = _finite_number(episode_reward)
        if number is not None:
            info["episode_reward"] = number
        elif episode_reward is not None:
            info = _bad_number("episode_reward", episode_reward, info)
    info |= _coerce_info(info)
    reward: Any = getattr(value, "reward", None)
    if info.get("reward_missing") and _finite_number(reward) == 0.0:
        reward = None
    return StepResult.scored(
        to_text(value.observation, max_chars=None),
        reward,
        done=_truth(getattr(value, "done", False)),
        info=info,
    )


def _finite_number(value: Any) -> float | None:
    """Return a number of any origin as a float; `None` for what is no finite number."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    # Text and bytes are never numbers, though float() reads them; neither are arrays of one number.
    if isinstance(value, (str, bytes, bytearray, memoryview)) or getattr(value, "shape", ()) != ():
        return None
    try:
        number = float(value)
    except Exception:  # whatever a foreign number makes of it
        return None
    return number if math.isfinite(number) else None


def _bad_number(name: str, value: object, info: Mapping[str, Any]) -> dict[str, Any]:
    """Say in `info` that a number is none, unless it names an error already."""
    if info.get("error"):
        return dict(info)
    text = _shown(value)
    return {
        **info,
        "error": f"the environment gave the {name} {text}, which is not a finite number",
        "error_kind": str(ErrorKind.ENV),
        "retryable": False,
    }


def _has_info_types(info: Mapping[str, Any]) -> bool:
    """Return whether the keys of a fixed meaning have the types `StepResult` names."""
    if _INFO_NAMES.isdisjoint(info):
        return True
    return all(isinstance(info[name], kinds) for name, kinds in _INFO_TYPES if name in info)


def _coerce_info(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a fixed meaning that have another type, in the right one."""
    coerced: dict[str, Any] = {}
    for name, kinds in _INFO_TYPES:
        if name not in info or isinstance(info[name], kinds):
            continue
        value: Any = info[name]
        if bool in kinds:
            coerced[name] = _truth(value)
        else:
            coerced[name] = _error_text(value) if _truth(value) else ""
    return coerced


def _no_result(value: Any) -> StepResult:
    hint = ""
    if inspect.iscoroutine(value):
        value.close()
        hint = ": override astep or areset for a coroutine"
    text = _shown(value)
    return StepResult.failed(f"the environment returned {text}, which is no StepResult{hint}")


def _shown(value: object) -> str:
    try:
        return to_text(repr(value), max_chars=200)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"


def _truth(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # an array of several
        return True


def _error_text(error: object) -> str:
    if not isinstance(error, BaseException):
        return to_text(error) or "unknown error"
    if isinstance(error, TwinkleEnvError):
        return to_text(error) or type(error).__name__
    return to_text(describe_error(error))
