"""What the driver and the workers send each other: one pickle of plain data per call.

The driver has neither the environment package nor its exception classes, so objects of other
classes arrive as plain data: models and dataclasses as dicts, enum members as their values,
anything else as text.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, NamedTuple, cast

from twinkle_agentic.envs.base import StepResult
from twinkle_agentic.envs.errors import (
    EnvError,
    EnvTimeoutError,
    ErrorKind,
    TwinkleEnvError,
    WorkerLostError,
)

__all__ = [
    "Failure",
    "Op",
    "Reply",
    "SlotRequest",
    "as_result",
    "failure_of",
    "pack_replies",
    "pack_reply",
    "pack_requests",
    "pack_step",
    "unpack_replies",
    "value_or_raise",
]

Op = Literal["make", "reset", "step", "tools", "evaluate"]

_SHARED_MODULES = sys.stdlib_module_names | {"numpy", "twinkle_agentic"}  # importable on both sides
_MAX_REPR_CHARS = 2_000
_PLAIN = frozenset({str, float, int, bool, type(None)})

Reply = tuple[str, float, bool, dict[str, Any]] | bytes
"""A step result that is plain data through and through, or anything else, pickled for itself."""


class SlotRequest(NamedTuple):
    """One call to one slot.

    Attributes:
        op: What to do.
        slot: Index in the whole pool.
        args: Of the env's method.
        timeout_s: Seconds the call may take, queueing behind an earlier call of the slot included.
        incarnation: Of the worker that started the episode; `None` where no episode is needed.
        episode: Which episode of the slot it belongs to, counted by the driver: a slot refuses
            calls of an earlier episode than that of its latest reset.
    """

    op: Op
    slot: int
    args: tuple[Any, ...] = ()
    timeout_s: float = 120.0
    incarnation: int | None = None
    episode: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a slot call failed, as text, so that it always crosses.

    Attributes:
        text: Type and message of the error.
        kind: An `ErrorKind` value.
        retryable: Whether a new episode may well succeed.
        worker_lost: The process that held the slot has ended.
    """

    text: str
    kind: str = ErrorKind.ENV.value
    retryable: bool = False
    worker_lost: bool = False

    def as_result(self) -> StepResult:
        """Make the result of a step that failed with this."""
        return StepResult.failed(self.text, kind=self.kind, retryable=self.retryable)

    def as_error(self) -> TwinkleEnvError:
        """Make the exception that a failed `reset` raises."""
        if self.worker_lost:
            return WorkerLostError(self.text, retryable=self.retryable)
        if self.kind == ErrorKind.TIMEOUT:
            return EnvTimeoutError(self.text, retryable=self.retryable)
        error = EnvError(self.text, retryable=self.retryable)
        error.kind = next((kind for kind in ErrorKind if kind == self.kind), ErrorKind.ENV)
        return error


def as_result(value: Any) -> StepResult:
    """Return the result of a slot call, a failure as a result with `done=True`."""
    return value.as_result() if isinstance(value, Failure) else value


def value_or_raise(value: Any) -> Any:
    """Return the value of a slot call, or raise what its failure stands for."""
    if isinstance(value, Failure):
        raise value.as_error()
    return value


def failure_of(error: BaseException, what: str) -> Failure:
    """Describe an exception raised by other people's code; the exception itself is not kept.

    Args:
        error: What was raised.
        what: What raised it, for the text.
    """
    try:
        said = str(error)
    except Exception:  # an exception class whose __str__ is broken
        said = "(its message could not be read)"
    name = type(error).__name__
    if isinstance(error, TwinkleEnvError):
        return Failure(
            text=f"{what}: {said or name}", kind=str(error.kind), retryable=bool(error.retryable)
        )
    return Failure(text=f"{what}: {name}: {said}" if said else f"{what}: {name}")


def pack_requests(requests: Sequence[SlotRequest]) -> bytes:
    """Pickle requests; plain tuples, which takes an eighth of the time of named ones.

    Raises:
        TypeError: One holds something that cannot be pickled.
    """
    try:
        return pickle.dumps([tuple(request) for request in requests], protocol=5)
    except Exception as error:
        raise TypeError(
            f"the arguments cannot be sent to the worker that holds the environment: {error}; "
            "pass JSON values"
        ) from error


def pack_reply(value: object) -> Reply:
    """Make the reply of one call; what does not pickle becomes text.

    Args:
        value: A `StepResult`, a `Failure`, or what the method of the env returned.
    """
    if isinstance(value, StepResult):
        value = ("result", value.observation, value.reward, value.done, value.info)
    elif isinstance(value, Failure):
        value = ("failure", value.text, value.kind, value.retryable, value.worker_lost)
    else:
        value = ("value", value)
    try:
        return _dumps(value)
    except Exception:
        return _dumps(_packable(value))


def pack_step(value: tuple[str, float, bool, dict[str, Any]] | Failure) -> Reply:
    """Make the reply of a step from the fields of its result."""
    if isinstance(value, Failure):
        return pack_reply(value)
    return value if _is_plain(value[3]) else pack_reply(StepResult(*value))


def pack_replies(incarnation: int, replies: Sequence[Reply | None]) -> bytes:
    """Pickle the replies of one message.

    Args:
        incarnation: Tells one life of the worker process from the next.
        replies: Made by `pack_reply`, in the order of the requests.
    """
    return pickle.dumps((incarnation, replies), protocol=5)


def unpack_replies(message: bytes) -> tuple[int, list[Any]]:
    """Read the replies of one message.

    Returns:
        The worker's incarnation, and for each request a `StepResult`, a `Failure` or what the
        method returned.
    """
    incarnation, replies = pickle.loads(message)
    return incarnation, [_unpack(reply) for reply in replies]


def _unpack(reply: Reply) -> Any:
    if isinstance(reply, tuple):
        return StepResult(*reply)
    try:
        tag, *fields = pickle.loads(reply)
    except Exception as error:
        return failure_of(error, "the worker's reply cannot be read on this machine")
    if tag == "result":
        return StepResult(*fields)
    if tag == "failure":
        text, kind, retryable, worker_lost = fields
        return Failure(text=text, kind=kind, retryable=retryable, worker_lost=worker_lost)
    return fields[0]


def _is_plain(value: Any) -> bool:
    """Tell whether a value is made of JSON's own types and no others."""
    kind = cast("type[Any]", type(value))
    if kind is dict:
        for key, item in cast("dict[Any, Any]", value).items():
            if type(key) is not str or not (type(item) in _PLAIN or _is_plain(item)):
                return False
        return True
    return kind in _PLAIN or (kind is list and all(map(_is_plain, cast("list[Any]", value))))


class _PlainPickler(pickle.Pickler):
    """Turns objects of classes that the other side may not have into plain data."""

    def reducer_override(self, obj: Any, /) -> Any:
        named = obj if isinstance(obj, (type, FunctionType)) else cast("type[Any]", type(obj))
        if named.__module__.partition(".")[0] in _SHARED_MODULES and not isinstance(obj, enum.Enum):
            return NotImplemented
        return _as_plain(obj)


def _as_plain(obj: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if not isinstance(obj, type):
        if isinstance(obj, enum.Enum):
            return _same, (obj.value,)
        if isinstance(obj, str):  # a subclass of a plain type, which may override `__str__`
            return _same, (str.__str__(obj),)
        if isinstance(obj, (int, float)):
            return _same, (int(obj) if isinstance(obj, int) else float(obj),)
        if isinstance(obj, dict):
            return dict, (list(cast("dict[Any, Any]", obj).items()),)
        if isinstance(obj, (list, tuple, set, frozenset)):
            return list, (list(cast("list[Any]", obj)),)
        if callable(dump := getattr(obj, "model_dump", None)):
            return _same, (dump(),)
        if dataclasses.is_dataclass(obj):
            return _same, ({f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)},)
    return _same, (_text(obj),)


def _same(value: Any) -> Any:
    return value


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _PlainPickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def _packable(value: Any) -> Any:
    """Replace by text the parts of a value that do not pickle."""
    try:
        _dumps(value)
    except Exception:
        pass
    else:
        return value
    if type(value) is dict:
        items = cast("dict[Any, Any]", value).items()
        return {_packable(key): _packable(item) for key, item in items}
    if type(value) in (list, tuple):
        return type(value)(_packable(item) for item in cast("list[Any]", value))
    return _text(value)


def _text(value: object) -> str:
    try:
        return repr(value)[:_MAX_REPR_CHARS]
    except Exception:
        return f"<{type(value).__name__}>"
