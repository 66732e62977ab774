"""OpenEnv observations as text for a model, and the images in them.

The kinds that OpenEnv's environments use are known by their fields: programs (`stdout`, `stderr`,
`exit_code`), also one level down in `result`; MCP tool results; chat messages. All others are
listed field by field, followed by the metadata (`_visible` says what is hidden). The first
observation of an episode also says what the environment is, what the fields mean and how to act,
unless it is a text of the environment's own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from twinkle_agentic.envs.openenv._visible import is_shown, shown_metadata
from twinkle_agentic.envs.text import is_unshown_data, render_command_output, render_fields
from twinkle_agentic.tools.text import to_jsonable, to_text

__all__ = ["Guide", "Rendered", "Renderer", "mcp_error", "observation_fields", "start_error"]

_PROGRAM = frozenset({"stdout", "stderr", "exit_code"})
_MIN_REPEAT_CHARS = 80
_MOVES = re.compile(r"(legal|valid|allowed)_(actions?|moves?)")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What is said beside the first observation of an episode.

    Attributes:
        about: What the environment is.
        meanings: Of the fields, by name.
        acting: How to act.
    """

    about: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict[str, str])
    acting: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """An observation for a model: text of any length, and PNG or JPEG images that it names."""

    text: str
    images: list[bytes]


class Renderer:
    """Renders the observations of one environment, in order.

    Args:
        only: Names of fields and metadata to show, in this order, in place of the built-in choice.
        hide: Names to hide besides.
    """

    def __init__(self, *, only: Collection[str] | None = None, hide: Collection[str] = ()) -> None:
        self._only = None if only is None else list(only)
        self._hide = frozenset(hide)
        self._told: dict[str, Any] = {}
        self._offered: tuple[str, list[Any]] | None = None

    def not_offered(self, arguments: Mapping[str, Any]) -> str:
        """Return a note on a move that the latest observation does not list, or nothing.

        Args:
            arguments: Of the move. It is looked for among those of the type of the listed ones,
                where there is one alone: of several it is not known which one is meant.
        """
        if self._offered is None:
            return ""
        listed, choices = self._offered
        moves = {
            name: value for name, value in arguments.items() if type(value) is type(choices[0])
        }
        name, move = moves.popitem() if len(moves) == 1 else ("", None)
        return f"[{name}={move!r} was not among {listed}]" if name and move not in choices else ""

    def render(self, observation: Any, *, guide: Guide | None = None) -> Rendered:
        """Render an observation.

        Args:
            observation: A mapping of fields, an Observation object, a string, or any other value.
            guide: It is that of a reset, and this may be said beside it. What a later observation
                says in its metadata, or beside the messages or the output of a program, is shown
                where it has changed.
        """
        fields = observation_fields(observation)
        images: list[bytes] = []
        if fields is None:
            return Rendered(to_text(observation, max_chars=None), images)
        if guide is not None:
            self._told = {}
        metadata = observation_fields(fields.get("metadata")) or {}
        self._offered = self._choices({**metadata, **fields})
        if self._only is not None:
            chosen = {n: fields.get(n, metadata.get(n)) for n in self._only}
            return Rendered(render_fields(chosen, name_all=len(chosen) > 1, images=images), images)
        shown = {name: value for name, value in fields.items() if is_shown(name, self._hide)}
        return Rendered(self._by_kind(shown, fields, guide, images), images)

    def _choices(self, fields: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
        """Return the moves that an observation lists and shows, with their name."""
        for name, value in fields.items():
            seen = name not in self._hide if self._only is None else name in self._only
            if seen and _MOVES.fullmatch(name) and isinstance(value, list) and value:
                choices = cast("list[Any]", value)
                if all(type(choice) is type(choices[0]) in (int, str) for choice in choices):
                    return name, choices
        return None

    def _by_kind(
        self,
        shown: dict[str, Any],
        fields: Mapping[str, Any],
        guide: Guide | None,
        images: list[bytes],
    ) -> str:
        first = guide is not None
        head, own, listed = "", "", dict[str, Any]()
        messages = fields.get("messages")
        if "tool_name" in fields and "result" in fields and "error" in fields:
            head = own = _render_mcp(fields, images)
            shown = {}
        elif "stdout" in fields:
            head = _render_program(fields)
            listed = {n: v for n, v in shown.items() if n not in {*_PROGRAM, "exception"}}
            shown = {}
        elif "stdout" in (result := observation_fields(fields.get("result")) or {}):
            head = _render_program(result)
            shown.pop("result", None)
        elif isinstance(messages, list) and (chat := _render_messages(fields, first)):
            head = own = chat
            shown = {n: v for n, v in shown.items() if n not in ("messages", "prompt")}
        else:
            listed, shown = _without_repeats(shown), {}
        beside = {**listed, **shown}
        # Beside the output of a program it is the server's record of the run.
        metadata = {} if "stdout" in fields else observation_fields(fields.get("metadata")) or {}
        more = {**shown, **shown_metadata(metadata, beside=beside, hide=self._hide)}
        listed.update({n: v for n, v in more.items() if n not in self._told or self._told[n] != v})
        self._told.update(more)
        text = render_fields(listed, name_all=bool(head), images=images)
        said = [value for value in listed.values() if not _is_empty(value)]
        if len(said) == 1 and isinstance(said[0], str) and not head:
            own = text  # a question, a prompt: it speaks for itself
        parts = [head, text]
        if guide is not None and not own:
            parts = [guide.about, *parts, _legend(guide.meanings, text), guide.acting]
        return "\n".join(part for part in parts if part)


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


def _without_repeats(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop texts that another field has said already and, beside a `text`, data of no use."""
    kept: dict[str, Any] = {}
    texts: list[str] = []
    has_text = bool(str(fields.get("text") or "").strip())
    for name, value in fields.items():
        if has_text and is_unshown_data(value):
            continue
        text = value.strip() if isinstance(value, str) else ""
        if text and any(text == other or _is_part(text, other) for other in texts):
            continue
        texts.append(text)
        kept[name] = value
    return kept


def _is_part(text: str, other: str) -> bool:
    """Whether a text that is long enough not to be there by chance is in another one."""
    return len(text) >= _MIN_REPEAT_CHARS and text in other


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def _legend(meanings: Mapping[str, str], text: str) -> str:
    named = dict.fromkeys(re.findall(r"^(\w+):", text, re.MULTILINE))
    lines = [f"- {name}: {meanings[name]}" for name in named if meanings.get(name)]
    return "\n".join(["What the fields mean:", *lines]) if lines else ""


def _render_mcp(fields: Mapping[str, Any], images: list[bytes]) -> str:
    error = mcp_error(fields)
    if error is not None:
        return f"Error: {error}"
    result = observation_fields(fields["result"])
    if result is None:
        return to_text(fields["result"], max_chars=None)
    return _mcp_content(result, images)


def _mcp_content(result: Mapping[str, Any], images: list[bytes] | None = None) -> str:
    if result.get("data") is not None:
        return to_text(to_jsonable(result["data"]), max_chars=None)
    texts: list[str] = []
    for part in result.get("content") or ():
        block = observation_fields(part) or {}
        text = block.get("text")
        if not isinstance(text, str):
            data = block.get("data")
            text = render_fields({"data": data}, images=images) if isinstance(data, str) else ""
            # Its size or number where it is an image that is passed on, else its kind.
            text = text if text.startswith("[image ") else f"[{block.get('type', 'content')}]"
        texts.append(text)
    if texts:
        return "\n".join(texts)
    structured = result.get("structured_content")
    if structured is not None:
        return to_text(to_jsonable(structured), max_chars=None)
    known = {"content", "data", "structured_content", "is_error", "meta"}
    return to_text(to_jsonable(dict(result)), max_chars=None) if result.keys() - known else ""


def _render_program(fields: Mapping[str, Any]) -> str:
    stderr = _without_server_frames(str(fields.get("stderr") or ""))
    exception = _without_server_frames(str(fields.get("exception") or "")).strip()
    if exception and exception.splitlines()[0] not in stderr:
        stderr = f"{stderr.rstrip()}\n{exception}" if stderr.strip() else exception
    exit_code = fields.get("exit_code")
    return render_command_output(
        str(fields.get("stdout") or ""), stderr, exit_code if isinstance(exit_code, int) else None
    )


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
