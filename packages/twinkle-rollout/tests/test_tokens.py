from __future__ import annotations

from typing import Any

import pytest

from twinkle_agentic.rollout._tokens import token_turn


@pytest.mark.parametrize(
    ("ids", "logprobs", "problem"),
    [
        ([1, 2], [-0.5, 0.0], None),
        ([1, 2], [-0.5], "2 token ids, but 1"),
        ([1, -2], [-0.5, -1], "whole numbers"),
        ([1, True], [-0.5, -1], "whole numbers"),
        ([1, 2.0], [-0.5, -1], "whole numbers"),
        ([1, 2], [-0.5, None], "finite"),
        ([1, 2], [-0.5, float("nan")], "finite"),
        ([1, 2], [-0.5, float("-inf")], "finite"),
        ([1, 2], [-0.5, 0.1], "<= 0"),
        (None, [-0.5], "sent none"),
        ([1, 2], None, "sent none"),
    ],
)
def test_what_a_trainer_must_not_use_is_flagged(
    ids: Any, logprobs: Any, problem: str | None
) -> None:
    found = token_turn(
        1,
        prompt_token_ids=[1],
        token_ids=ids,
        logprobs=logprobs,
        want_ids=True,
        want_logprobs=True,
    )["problem"]
    assert found is None if problem is None else problem in str(found)


def test_what_was_not_asked_for_may_be_missing() -> None:
    found = token_turn(
        1,
        prompt_token_ids=None,
        token_ids=None,
        logprobs=[-0.5],
        want_ids=False,
        want_logprobs=True,
    )
    assert found["problem"] is None
