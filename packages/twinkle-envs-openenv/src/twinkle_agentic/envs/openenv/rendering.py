"""OpenEnv observations as text for a model.

The kinds that OpenEnv's environments use are known by their fields: programs (`stdout`, `stderr`,
`exit_code`), also one level down in `result`; MCP tool results; chat messages; an observation that
carries its own `text`. All others are listed field by field. `reward` and `done` are never shown,
nor is `metadata`, which holds what the model must not see (a chess engine's evaluation, the
commands of a grader); but a first observation that has no field at all has the task in there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from twinkle_agentic.envs.text import (
    render_command_output,
    render_fields,
    to_jsonable,
    to_text,
)

__all__ = ["mcp_error", "observation_fields", "render_observation", "start_error"]

_HINT = "pass observation_renderer= to put them into words"
_HIDDEN = frozenset({"metadata", "reward", "done"})
_PROGRAM = frozenset({"stdout", "stderr", "exit_code"})
_TASK = (  # names in the metadata of a first observation that are meant for the model
    "question",
    "company",
    "problem",
    "task",
    "task_prompt",
    "goal",
    "prompt",
    "instruction",
    "instructions",
    "message",
)

# Frames of the interpreters that coding environments run inside the server.
_SERVER_FRAME = re.compile(
    r'^\s*File "(?:[^"]*(?:smolagents|python_executor|local_python_executor)[^"]*'
    r'|[^"]*/ast\.py|<unknown>)"'
)
_FRAME = re.compile(r'^\s*File "')
# The last line of pydantic's errors; of no use to a model.
_LINK_LINE = re.compile(r"\n *For further information visit \S+")


def observation_fields(observation: Any) -> dict[str, Any] | None:
    """Return the fields of a mapping or a model, not to be changed; `None` of anything else."""
    if observation is None or isinstance(observation, (str, int, float, list)):
        return None
    if isinstance(observation, dict):
        return cast("dict[str, Any]", observation)
    if isinstance(observation, Mapping):
        return dict(cast("Mapping[str, Any]", observation))
    dump = getattr(observation, "model_dump", None)
    if callable(dump) and not isinstance(observation, type):
        return cast("dict[str, Any]", dump())
    fields = getattr(observation, "__dataclass_fields__", None)
    if fields is not None:
        return {name: getattr(observation, name) for name in fields}
    return None


def render_observation(observation: Any, *, first: bool = False) -> str:
    """Render an observation.

    Args:
        observation: A mapping of fields, an Observation object, a string, or any other value.
        first: It is that of a reset.

    Returns:
        Text of any length; the adapters cut it.
    """
    fields = observation_fields(observation)
    if fields is None:
        return to_text(observation, max_chars=None)
    if "tool_name" in fields and "result" in fields and "error" in fields:
        return _render_mcp(fields)
    if "stdout" in fields:
        return _render_program(fields)
    nested = observation_fields(fields.get("result"))
    if nested is not None and "stdout" in nested:
        text = _render_program(nested, extras=False)
        return text or (
            render_fields(fields, skip={*_HIDDEN, "result"}, hint=_HINT) if first else ""
        )
    if isinstance(fields.get("messages"), list) and (text := _render_messages(fields, first)):
        return text
    own = fields.get("text")
    if isinstance(own, str) and own.strip():
        return own
    if first and fields.keys() <= _HIDDEN:
        return _render_task(observation_fields(fields.get("metadata")) or {})
    return render_fields(fields, skip=_HIDDEN, hint=_HINT)


def mcp_error(observation: Any) -> str | None:
    """Return the message of a failed MCP tool call; `None` for anything else."""
    fields = observation_fields(observation)
    if fields is None or "tool_name" not in fields or "error" not in fields:
        return None
    error = observation_fields(fields["error"])
    if error is not None:
        said = str(error.get("message") or error.get("error_type") or "the tool failed")
        return _LINK_LINE.sub("", said)
    if fields["error"]:
        return str(fields["error"])
    result = observation_fields(fields.get("result"))
    if result is not None and result.get("is_error"):
        return _mcp_content(result) or "the tool failed"
    return None


def start_error(observation: Any, *, done: bool, metadata: Mapping[str, Any]) -> str | None:
    """Return what a first observation says went wrong; `None` where nothing did.

    Some environments do not raise: they end the episode at once, with an error in the metadata, or
    in a field.
    """
    if done and metadata.get("status") == "error":
        return str(metadata.get("error") or metadata.get("message") or dict(metadata))
    said = (observation_fields(observation) or {}).get("error")
    return said if isinstance(said, str) and said.strip() else None


def _render_task(metadata: Mapping[str, Any]) -> str:
    task = {name: metadata[name] for name in _TASK if isinstance(metadata.get(name), str)}
    return render_fields(task)


def _render_mcp(fields: Mapping[str, Any]) -> str:
    error = mcp_error(fields)
    if error is not None:
        return f"Error: {error}"
    result = observation_fields(fields["result"])
    if result is None:
        return to_text(fields["result"], max_chars=None)
    return _mcp_content(result)


def _mcp_content(result: Mapping[str, Any]) -> str:
    if result.get("data") is not None:
        return to_text(to_jsonable(result["data"]), max_chars=None)
    texts: list[str] = []
    for part in result.get("content") or ():
        block = observation_fields(part) or {}
        text = block.get("text")
        texts.append(text if isinstance(text, str) else f"[{block.get('type', 'content')}]")
    if texts:
        return "\n".join(texts)
    structured = result.get("structured_content")
    if structured is not None:
        return to_text(to_jsonable(structured), max_chars=None)
    known = {"content", "data", "structured_content", "is_error", "meta"}
    return to_text(to_jsonable(dict(result)), max_chars=None) if result.keys() - known else ""


def _render_program(fields: Mapping[str, Any], *, extras: bool = True) -> str:
    stderr = _without_server_frames(str(fields.get("stderr") or ""))
    exception = _without_server_frames(str(fields.get("exception") or "")).strip()
    if exception and exception.splitlines()[0] not in stderr:
        stderr = f"{stderr.rstrip()}\n{exception}" if stderr.strip() else exception
    exit_code = fields.get("exit_code")
    text = render_command_output(
        str(fields.get("stdout") or ""), stderr, exit_code if isinstance(exit_code, int) else None
    )
    if not extras:
        return text
    more = render_fields(fields, skip={*_PROGRAM, *_HIDDEN, "exception"}, hint=_HINT, name_all=True)
    return "\n".join(part for part in (text, more) if part)


def _without_server_frames(stderr: str) -> str:
    """Drop a traceback through the server's own interpreter, but for what it says at the end."""
    lines = stderr.splitlines()
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    if not frames or not all(
        _SERVER_FRAME.match(lines[i]) or "/concurrent/futures/" in lines[i] for i in frames
    ):
        return stderr
    # Where the error is said before the traceback too, those lines stay and the rest goes.
    starts = [i for i, line in enumerate(lines[: frames[0]]) if line.startswith("Traceback")]
    kept = lines[: starts[0]] if starts else []
    after = frames[-1] + 1
    while after < len(lines) and lines[after].startswith(" "):
        after += 1
    # The second time the class has its module before it.
    said = tuple(line for line in kept if line.strip())
    kept += [line for line in lines[after:] if not said or not line.endswith(said)]
    return "\n".join(kept) or stderr


def _render_messages(fields: Mapping[str, Any], first: bool) -> str:
    said: list[str] = []
    for entry in fields["messages"]:
        message = observation_fields(entry)
        if message is None or "content" not in message:
            return ""  # no chat: list the fields
        said.append(to_text(to_jsonable(message["content"]), max_chars=None))
    prompt = str(fields.get("prompt") or "") if first else ""
    if not any(prompt.strip() in text for text in said):
        said.insert(0, prompt)
    return "\n".join(text for text in said if text)
