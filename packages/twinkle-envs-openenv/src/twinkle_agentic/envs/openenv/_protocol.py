"""The frames of the OpenEnv websocket protocol: what is sent, and what an answer means.

A client sends `{"type": "reset" | "step" | "state" | "mcp" | "close", "data": {...}}` and gets one
frame per message, in order, without a number that would tell which message it answers.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any, Final, cast

from twinkle_agentic.envs.errors import (
    CapacityError,
    EnvError,
    ErrorKind,
    SessionClosedError,
    TwinkleEnvError,
)
from twinkle_agentic.envs.openenv.errors import ActionRefusedError, ServerError, ServerFullError
from twinkle_agentic.tools.text import clean_text

__all__ = [
    "CLOSE_MESSAGE",
    "MAX_ACTION_BYTES",
    "MessageType",
    "decode",
    "describe_field_errors",
    "describe_raised",
    "encode",
    "ends_session",
    "rpc_result",
    "unsolicited",
]

MAX_ACTION_BYTES: Final = 16 * 2**20
"""Largest message a server takes: uvicorn's own limit, which OpenEnv leaves alone."""

CLOSE_MESSAGE: Final = b'{"type":"close"}'


class MessageType(StrEnum):
    """What a client can ask of its session."""

    RESET = "reset"
    """Start an episode."""
    STEP = "step"
    """Run an action."""
    STATE = "state"
    """Report the environment's state."""
    MCP = "mcp"
    """A JSON-RPC request to the environment's MCP server."""


_ANSWERS = {
    MessageType.RESET: "observation",
    MessageType.STEP: "observation",
    MessageType.STATE: "state",
    MessageType.MCP: "mcp",
}

_HEADS = {kind: f'{{"type":"{kind.value}","data":' for kind in MessageType}
_STATE_FRAME = '{"type":"state"}'
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_ORDER_LOST = "which answer belongs to which message is unknown, so the session was closed"

# After these the session goes on; any other code ends it.
_SESSION_LIVES = frozenset({"EXECUTION_ERROR", "UNKNOWN_TYPE", "INVALID_JSON"})


def encode(kind: MessageType, data: Any, *, max_bytes: int = MAX_ACTION_BYTES) -> bytes:
    """Make the frame of a message.

    Args:
        kind: What is asked.
        data: JSON values; `None` asks for the state, which takes none. Lone surrogates are replaced
            by U+FFFD: no UTF-8 encoder takes them.
        max_bytes: Largest frame the server takes.

    Raises:
        ActionRefusedError: It is no JSON (an object of another type, NaN, an infinity) or too
            large.
    """
    try:
        text = _STATE_FRAME if data is None else f"{_HEADS[kind]}{_to_json(data)}}}"
    except (TypeError, ValueError, RecursionError) as error:
        raise ActionRefusedError(f"the {kind} data is no JSON: {error}") from None
    try:
        frame = text.encode()
    except UnicodeEncodeError:
        frame = clean_text(text).encode()
    if len(frame) > max_bytes:
        raise ActionRefusedError(
            f"the {kind} message has {len(frame)} bytes and the server takes {max_bytes} "
            "(max_action_bytes): nothing was sent; send less, or raise uvicorn's ws_max_size and "
            "max_action_bytes"
        )
    return frame


def decode(frame: str | bytes, kind: MessageType) -> dict[str, Any]:
    """Read the frame that answers a message.

    Returns:
        The `data` of the answer.

    Raises:
        ServerFullError: `CAPACITY_REACHED`.
        ActionRefusedError: `VALIDATION_ERROR`, with the field errors.
        ServerError: Any other error frame.
        SessionClosedError: The frame is no answer to `kind`: from here on nobody knows which frame
            answers what.
    """
    try:
        message: Any = json.loads(frame if isinstance(frame, str) else str(frame, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise SessionClosedError(
            f"the answer to {kind} is no JSON ({error}), found {_start(frame)!r}: the session was "
            "closed"
        ) from None
    if isinstance(message, dict):
        answer = cast("dict[str, Any]", message)
        data = answer.get("data")
        if answer.get("type") == "error":
            raise _server_error(
                cast("dict[str, Any]", data if isinstance(data, dict) else {}), kind
            )
        if answer.get("type") == _ANSWERS[kind] and isinstance(data, dict):
            return cast("dict[str, Any]", data)
    raise SessionClosedError(
        f"expected a frame of type {_ANSWERS[kind]!r} in answer to {kind}, found "
        f"{_start(frame)!r}: {_ORDER_LOST}"
    )


def _server_error(data: dict[str, Any], kind: MessageType | None) -> TwinkleEnvError:
    """Turn the `data` of an error frame into the exception it stands for."""
    code = str(data.get("code") or "UNKNOWN")
    said = str(data.get("message") or "").strip()
    if code == "CAPACITY_REACHED":
        return ServerFullError(
            f"the server is full: {data.get('active_sessions', '?')} of "
            f"{data.get('max_sessions', '?')} sessions taken"
        )
    if code == "VALIDATION_ERROR":
        raw: Any = data.get("errors")
        errors = cast("list[dict[str, Any]]", raw) if isinstance(raw, list) else []
        details = describe_field_errors(errors) or said or "no details given"
        return ActionRefusedError(f"the server refused the {kind}: {details}", errors=errors)
    if code == "FACTORY_ERROR":
        name = data.get("factory_name") or "the environment"
        return ServerError(
            f"the server could not build {name!s} ({said or 'no reason given'}): see the server's "
            "log",
            code=code,
        )
    if code == "EXECUTION_ERROR":
        return ServerError(describe_raised(said), code=code, session_lives=True)
    lives = code in _SESSION_LIVES
    return ServerError(
        f"the server answered {code}: {said or 'no details given'}"
        + ("" if lives else "; it ended the session"),
        code=code,
        session_lives=lives,
        kind=ErrorKind.ENV if lives else ErrorKind.SESSION_LOST,
    )


def unsolicited(frame: str | bytes) -> TwinkleEnvError:
    """Turn a frame that nobody asked for into the reason why the session ends."""
    try:
        message: Any = json.loads(frame)
        if message["type"] == "error":
            return _server_error(message["data"], None)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return SessionClosedError(
        f"the server sent a frame that answers no message, {_start(frame)!r}: {_ORDER_LOST}"
    )


def ends_session(error: TwinkleEnvError) -> bool:
    """Whether the session is of no use after an answer that raised this."""
    if isinstance(error, ServerError):
        return not error.session_lives
    return isinstance(error, (SessionClosedError, CapacityError))


def describe_raised(said: str) -> str:
    """Return the observation for an exception in the environment, of which only the text came.

    The text of a `KeyError` is the key alone.
    """
    if not said:
        return "the environment raised an exception without a message"
    bare = re.fullmatch(r"-?[\d.]+|'[^']*'|\"[^\"]*\"|\(.*\)", said)
    return f"the environment raised an error that says only {said}" if bare else said


def describe_field_errors(errors: list[dict[str, Any]]) -> str:
    """Render validation errors (pydantic's form) as `field: message; field: message`."""
    parts: list[str] = []
    for error in errors[:8]:
        try:
            where = ".".join(str(part) for part in error.get("loc", ()))
            parts.append(f"{where}: {error.get('msg')}" if where else str(error.get("msg")))
        except (AttributeError, TypeError):
            parts.append(str(error)[:200])
    if len(errors) > len(parts):
        parts.append(f"and {len(errors) - len(parts)} more")
    return "; ".join(parts)


def rpc_result(data: dict[str, Any]) -> Any:
    """Return the result of a JSON-RPC answer.

    Raises:
        EnvError: It is an error.
    """
    error = data.get("error")
    if error:
        raise EnvError(f"the MCP server answered with an error: {error!r}")
    return data.get("result")


def _start(frame: str | bytes) -> str:
    text = frame if isinstance(frame, str) else frame[:200].decode("utf-8", "replace")
    return text[:120]
