"""A chat-completions request as JSON, without writing again what has not changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twinkle_agentic.protocol._fields import items_of
from twinkle_agentic.protocol.sampling import sampling_fields
from twinkle_agentic.tools.text import clean_text

__all__ = ["Conversation", "request_body"]


class Conversation(list[dict[str, Any]]):
    """Messages of one episode that remember their JSON: each is written once, not once per turn.

    It only grows: messages are appended, and neither they nor the settings of the requests change.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        super().__init__(messages)
        self._parts: list[str] = []
        self._settings: tuple[Any, ...] = ()
        self._rest = ""

    def messages_json(self) -> str:
        """Return the JSON of the list."""
        self._parts.extend(_json(message) for message in self[len(self._parts) :])
        return f"[{','.join(self._parts)}]"

    def rest_json(self, model: str, params: Any, tools: Any, overrides: Mapping[str, Any]) -> str:
        """Return the JSON of the other fields, kept until one of these is another object."""
        settings = (model, params, tools, overrides)
        if len(self._settings) != 4 or any(
            a is not b for a, b in zip(settings, self._settings, strict=True)
        ):
            self._rest = _json(_other_fields(model, params, tools, overrides))
            self._settings = settings  # kept, so that no other object can take their place
        return self._rest


def request_body(
    model: str, trajectory: Mapping[str, Any], params: Any, overrides: Mapping[str, Any]
) -> bytes:
    """Write a request.

    Args:
        model: Name of the model.
        trajectory: `messages` and, where there are any, `tools`.
        params: An object with the attributes of `SamplingParams`.
        overrides: Further fields; they replace those of the same name.

    Raises:
        ValueError: Streaming was asked for, or a value has no place in JSON.
    """
    if overrides.get("stream"):
        raise ValueError("stream=True is not supported: the client reads whole replies")
    messages, tools = trajectory.get("messages"), trajectory.get("tools")
    if isinstance(messages, Conversation) and "messages" not in overrides:
        rest = messages.rest_json(model, params, tools, overrides)
        return f'{rest[:-1]},"messages":{messages.messages_json()}}}'.encode()
    fields = {"messages": items_of(messages), **_other_fields(model, params, tools, overrides)}
    return _json(fields).encode()


def _other_fields(
    model: str, params: Any, tools: Any, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model, **sampling_fields(params)}
    if tools:
        fields["tools"] = tools
    return {**fields, **overrides}


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        return clean_text(text)  # the half of a character is what no server takes
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the request cannot be written as JSON: {error}") from error
