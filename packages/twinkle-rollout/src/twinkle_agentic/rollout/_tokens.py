"""Token ids and log probabilities of each turn, checked on arrival."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from twinkle_agentic.protocol._reply import Completion
from twinkle_agentic.rollout.types import TokenTurn

__all__ = ["TokenLog", "token_turn"]


@dataclass(slots=True, kw_only=True)
class TokenLog:
    """The tokens of an episode, counted and where asked for kept.

    Attributes:
        want_ids: Ids were asked for.
        want_logprobs: Log probabilities were asked for.
        usage: The server's counts summed over the turns.
        latest: Prompt and reply of the latest turn together; `None` while nobody has said.
        turns: One record per turn; empty where nothing was asked for.
    """

    want_ids: bool
    want_logprobs: bool
    usage: dict[str, int] = field(default_factory=dict[str, int])
    latest: int | None = None
    turns: list[TokenTurn] = field(default_factory=list[TokenTurn])

    def add(self, turn: int, completion: Completion) -> None:
        """Take in what came back for turn number `turn`."""
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            value: Any = completion.usage.get(name)
            if isinstance(value, int):
                self.usage[name] = self.usage.get(name, 0) + value
        total: Any = completion.usage.get("total_tokens")
        prompt, sampled = completion.prompt_token_ids, completion.token_ids
        if isinstance(total, int):
            self.latest = total
        elif prompt is not None and sampled is not None:
            self.latest = len(prompt) + len(sampled)
        if self.want_ids or self.want_logprobs:
            self.turns.append(
                token_turn(
                    turn,
                    prompt_token_ids=prompt,
                    token_ids=sampled,
                    logprobs=completion.logprobs,
                    want_ids=self.want_ids,
                    want_logprobs=self.want_logprobs,
                )
            )


def token_turn(
    turn: int,
    *,
    prompt_token_ids: list[Any] | None,
    token_ids: list[Any] | None,
    logprobs: list[Any] | None,
    want_ids: bool,
    want_logprobs: bool,
) -> TokenTurn:
    """Make the record of one turn's tokens.

    Args:
        turn: Number of the turn, from 1.
        prompt_token_ids: Ids of the whole prompt.
        token_ids: Sampled ids.
        logprobs: One number per sampled token.
        want_ids: Ids were asked for.
        want_logprobs: Log probabilities were asked for.
    """
    problem: str | None = None
    if want_ids and (token_ids is None or prompt_token_ids is None):
        problem = "token ids were asked for, and the server sent none"
    elif want_logprobs and logprobs is None:
        problem = "log probabilities were asked for, and the server sent none"
    elif not _are_ids(prompt_token_ids) or not _are_ids(token_ids):
        problem = "token ids that are no whole numbers >= 0"
    elif logprobs is not None and not _are_logprobs(logprobs):
        problem = "log probabilities that are no finite numbers <= 0"
    elif logprobs is not None and token_ids is not None and len(logprobs) != len(token_ids):
        problem = f"{len(token_ids)} token ids, but {len(logprobs)} log probabilities"
    return {
        "turn": turn,
        "prompt_token_ids": prompt_token_ids,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "problem": problem,
    }


def _are_ids(ids: list[Any] | None) -> bool:
    return not ids or (set(map(type, ids)) == {int} and min(ids) >= 0)


def _are_logprobs(values: list[Any]) -> bool:
    kinds = set(map(type, values))
    if bool in kinds or not all(issubclass(kind, (int, float)) for kind in kinds):
        return False
    return all(map(math.isfinite, values)) and max(values, default=0) <= 0
