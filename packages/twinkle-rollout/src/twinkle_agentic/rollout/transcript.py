"""What is said in one trajectory, in two forms: as it comes back, and as the server takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle_agentic.protocol.fields import fields_of, items_of
from twinkle_agentic.protocol.request import Conversation
from twinkle_agentic.rollout.history import Reply, read_reply, tool_message, wire_history

__all__ = ["Transcript"]


class Transcript:
    """The messages of one trajectory; grows with every turn.

    Args:
        messages: Those of the input; not changed.

    Attributes:
        messages: The whole conversation, for the output.
        tools: Definitions the model is offered; `None` for none.
        turns: Messages the model wrote.
        raw_replies: Those of them that had to be repaired, as they came.
    """

    def __init__(self, messages: object) -> None:
        self.messages: list[dict[str, Any]] = [
            dict(fields_of(message)) for message in items_of(messages)
        ]
        self.tools: Sequence[Any] | None = None
        self.turns = 0
        self.raw_replies: list[dict[str, Any]] = []
        self._wire = Conversation([])
        self._used_ids: set[str] = set()
        self._offered: frozenset[str] = frozenset()

    def begin(self, tools: Sequence[Any] | None) -> None:
        """Bring what was said so far into the form of the protocol.

        Args:
            tools: Definitions to offer to the model.
        """
        self.tools = tools or None
        self._offered = frozenset(
            str(fields_of(fields_of(tool).get("function")).get("name")) for tool in tools or ()
        )
        self._wire = Conversation(
            wire_history(self.messages, used_ids=self._used_ids, offered=self._offered)
        )

    def request(self) -> dict[str, Any]:
        """Return what the model is asked with: `messages` and, where there are any, `tools`."""
        asked: dict[str, Any] = {"messages": self._wire}
        if self.tools:
            asked["tools"] = self.tools
        return asked

    def take(self, message: object) -> Reply:
        """Take in the next message of the model, whatever it is."""
        self.turns += 1
        reply = read_reply(message, turn=self.turns, used_ids=self._used_ids, offered=self._offered)
        if reply.repaired:
            self.raw_replies.append({"turn": self.turns, "message": message})
        self.messages.append(reply.message)
        self._wire.append(reply.wire)
        return reply

    def answer(self, calls: Sequence[dict[str, Any]], texts: Sequence[str]) -> None:
        """Append one tool message for each call, in their order."""
        for call, text in zip(calls, texts, strict=True):
            message = tool_message(call["id"], text)
            self.messages.append(message)
            self._wire.append(message)
