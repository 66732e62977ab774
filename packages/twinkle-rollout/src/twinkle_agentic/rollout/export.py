"""Finished trajectories in the shapes other tools read: OpenEnv's training trace, JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from twinkle_agentic.protocol._fields import fields_of, items_of
from twinkle_agentic.rollout._files import whole_file
from twinkle_agentic.tools.text import clean_text, to_jsonable

__all__ = ["json_line", "training_trace", "write_jsonl"]


def training_trace(trajectory: Mapping[str, Any], *, trajectory_id: str) -> dict[str, Any]:
    """Make the dict of an OpenEnv `TrainingTrace` from the tokens of a trajectory.

    Each turn of the model is one entry: the prompt masked out, every sampled token learnt from.

    Args:
        trajectory: From `APIMultiTurnRollout`, with `token_turns`: sampled with log probabilities
            and `return_token_ids`.
        trajectory_id: Starts the identity of each turn, which must be unique among all that a
            trainer reads together.

    Returns:
        What `TrainingTrace.model_validate` takes; nothing of `openenv` is imported.

    Raises:
        ValueError: There are no tokens, or those of a turn must not be used; the turn is named.

    Source: `openenv.core.harness.training`, schema version 1.
    """
    turns = items_of(trajectory.get("token_turns"))
    if not turns or not trajectory_id:
        raise ValueError(
            f"a training trace needs token_turns and an id, found {len(turns)} turns and "
            f"{trajectory_id!r}: ask for log probabilities and return_token_ids"
        )
    return {
        "schema_version": 1,
        "turns": [_training_turn(fields_of(turn), trajectory, trajectory_id) for turn in turns],
    }


def json_line(trajectory: Mapping[str, Any]) -> str:
    """Return a trajectory as one line of JSON; what JSON does not know is written as text."""
    return clean_text(json.dumps(to_jsonable(dict(trajectory)), ensure_ascii=False)) + "\n"


def write_jsonl(path: str | os.PathLike[str], trajectories: Iterable[Mapping[str, Any]]) -> Path:
    """Write trajectories as JSON lines, whole or not at all.

    Args:
        path: The file; one that exists is replaced at the end.
        trajectories: In the order of the lines. What JSON does not know is written as text.

    Raises:
        OSError: The file cannot be written; nothing of it is left.
    """
    target = Path(path)
    with whole_file(target, sync=True) as file:
        file.writelines(json_line(trajectory) for trajectory in trajectories)
    return target


def _training_turn(
    turn: Mapping[str, Any], trajectory: Mapping[str, Any], trajectory_id: str
) -> dict[str, Any]:
    prompt, sampled = turn.get("prompt_token_ids"), turn.get("token_ids")
    logprobs: Any = turn.get("logprobs")
    problem = turn.get("problem")
    if problem is None and not (prompt and sampled and logprobs):
        problem = "token ids or log probabilities are missing"
    if problem is not None:
        raise ValueError(f"turn {turn.get('turn')} must not be trained on: {problem}")
    return {
        "node_id": f"{trajectory_id}/{turn['turn']}",
        "prompt_token_ids": items_of(prompt),
        "completion_token_ids": items_of(sampled),
        "per_token_logps": [float(value) for value in logprobs],
        "loss_mask": [0] * len(items_of(prompt)) + [1] * len(items_of(sampled)),
        "metadata": {
            "turn": turn["turn"],
            "reward": trajectory.get("reward"),
            "stop_reason": trajectory.get("stop_reason"),
        },
    }
