"""One JSON file per trajectory, for people to read."""

from __future__ import annotations

import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twinkle_agentic.rollout._files import whole_file
from twinkle_agentic.rollout.types import user_data_of
from twinkle_agentic.tools._outcome import describe_error
from twinkle_agentic.tools.text import to_jsonable

__all__ = ["TraceWriter", "trace_record"]

logger = logging.getLogger(__name__)

# Token ids and tensors make a trace unreadable; the messages hold the same text.
_LEFT_OUT = frozenset(
    {
        "attention_mask",
        "image_grid_thw",
        "input_ids",
        "labels",
        "logprobs",
        "mm_token_type_ids",
        "pixel_values",
        "position_ids",
        "token_turns",
    }
)


class TraceWriter:
    """Writes finished trajectories to a folder.

    A file appears complete or not at all, and never takes the place of another.

    Args:
        trace_dir: The folder; made if absent.
        trace_callback: Says of a finished trajectory whether to write it; by default all.
        success_callback: Says whether it is a success, for the `ok-` or `fail-` in the name. By
            default a positive reward without an error is one, and a trajectory without a reward is
            `unscored-`.
        build_record: Makes what is written, in place of `trace_record`.
    """

    def __init__(
        self,
        trace_dir: str | os.PathLike[str],
        *,
        trace_callback: Callable[[dict[str, Any]], bool] | None = None,
        success_callback: Callable[[dict[str, Any]], bool] | None = None,
        build_record: Callable[..., dict[str, Any]] | None = None,
    ) -> None:
        self.trace_dir = Path(trace_dir)
        self.trace_callback = trace_callback
        self.success_callback = success_callback
        self._build_record = build_record or trace_record
        self.trace_dir.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        trajectory: dict[str, Any],
        *,
        position: int,
        global_step: int | None = None,
        raw_replies: list[dict[str, Any]] | None = None,
    ) -> tuple[str | None, str | None]:
        """Write one trajectory; never raises.

        Args:
            trajectory: Finished.
            position: Its place in the batch, for the name.
            global_step: Training step, for the name.
            raw_replies: Messages of the model that had to be repaired, as they came.

        Returns:
            The path (`None` where nothing was written), and what went wrong (`None` for nothing).
        """
        try:
            if self.trace_callback is not None and not self.trace_callback(trajectory):
                return None, None
            judge = self.success_callback
            success = _judged(trajectory) if judge is None else bool(judge(trajectory))
            path = self.trace_dir / _name(trajectory, position, global_step, success)
            record = self._build_record(trajectory, idx=position, success=success)
            if raw_replies:
                record["raw_replies"] = raw_replies
            text = json.dumps(to_jsonable(record), ensure_ascii=False, indent=2)
            with whole_file(path, errors="backslashreplace") as file:
                file.write(text)
            return str(path), None
        except Exception as error:
            problem = describe_error(error)
            logger.warning("the trace of trajectory %d was not written: %s", position, problem)
            return None, problem


def trace_record(trajectory: dict[str, Any], *, idx: int, success: bool | None) -> dict[str, Any]:
    """Make what is written of a trajectory.

    Args:
        trajectory: Finished.
        idx: Its place in the batch.
        success: Whether it is one, `None` where nothing judged it.
    """
    record = {
        "trajectory": {k: v for k, v in trajectory.items() if k not in _LEFT_OUT},
        "ground_truth": user_data_of(trajectory).get("ground_truth") or "",
        "stop_reason": trajectory.get("stop_reason"),
        "truncated": bool(trajectory.get("truncated")),
        "turns": trajectory.get("turns"),
        "success": success,
    }
    if trajectory.get("error"):
        record["error"] = trajectory["error"]
    return record


def _judged(trajectory: Mapping[str, Any]) -> bool | None:
    reward = trajectory.get("reward")
    if reward is None:  # nothing judged it: no env, or a failure that is not the model's
        return None
    return bool(reward > 0) and not trajectory.get("error")


def _name(
    trajectory: Mapping[str, Any], position: int, global_step: int | None, success: bool | None
) -> str:
    data = user_data_of(trajectory)
    named = {**data, **({"id": trajectory["id"]} if trajectory.get("id") else {})}
    given = next((named[k] for k in ("id", "prompt_id") if named.get(k) not in (None, "")), "")
    label = re.sub(r"[^A-Za-z0-9_.-]+", "_", str(given))[:64]
    step = "" if global_step is None else f"step{int(global_step):06d}-"
    word = "unscored" if success is None else "ok" if success else "fail"
    parts = [word, *([label] if label else []), f"{position:05d}"]
    # Trajectories of one prompt share its id, and several rollouts may share the folder.
    return f"{step}{'-'.join(parts)}-{uuid.uuid4().hex[:8]}.json"
