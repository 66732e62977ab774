"""A trajectory's tokens, read by OpenEnv's own model of a training trace."""

from __future__ import annotations

from typing import Any

import pytest

from twinkle_agentic.rollout.export import training_trace

pytestmark = pytest.mark.integration


def test_openenv_reads_the_training_trace() -> None:
    from openenv.core.harness.training import TrainingTrace

    def turn(number: int, prompt: list[int], sampled: list[int]) -> dict[str, Any]:
        return {
            "turn": number,
            "prompt_token_ids": prompt,
            "token_ids": sampled,
            "logprobs": [-0.5] * len(sampled),
            "problem": None,
        }

    turns = [turn(1, [1, 2], [3]), turn(2, [1, 2, 3, 4], [5, 6])]
    trajectory = {"token_turns": turns, "reward": 1.0, "stop_reason": "stop"}
    trace = TrainingTrace.model_validate(training_trace(trajectory, trajectory_id="run/7"))
    assert [t.loss_mask for t in trace.turns] == [[0, 0, 1], [0, 0, 0, 0, 1, 1]]
    assert [t.node_id for t in trace.turns] == ["run/7/1", "run/7/2"]
    assert trace.turns[0].metadata["reward"] == 1.0
