"""A trajectory, played again where a failure that passes cost it its reward."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

from twinkle_agentic._aio.bounded import Deadline, must_propagate
from twinkle_agentic.rollout.episode import Episode, Plan

__all__ = ["play"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5  # a worker or a server that is being started again needs a moment
_LONGEST_PAUSE_S = 30.0


async def play(
    plan: Plan, trajectory: Mapping[str, Any], manager: Any | None, *, max_attempts: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Roll a trajectory out, at most `max_attempts` times; the deadline holds for all together.

    Returns:
        The finished trajectory, and those messages of the model that had to be repaired, as they
        came; both of the last attempt.
    """
    deadline = Deadline(plan.limits.deadline_s)
    errors: list[str] = []
    began = time.monotonic()
    while True:
        started = time.monotonic()
        episode = Episode(plan, trajectory, manager, deadline)
        out = await _contained(episode)
        if max_attempts > 1:
            out["attempts"] = len(errors) + 1
            out["earlier_errors"] = list(errors)
            out["timing"] = {**out["timing"], "earlier": started - began}
        pause_s = _pause_s(len(errors))
        left_s = deadline.left_s()
        may_pass = out["reward"] is None and out["retryable"]
        if not may_pass or len(errors) + 1 >= max_attempts:
            break
        if left_s is not None and left_s <= pause_s:
            break
        errors.append(str(out["error"]))
        await asyncio.sleep(pause_s)
    return out, episode.transcript.raw_replies


async def _contained(episode: Episode) -> dict[str, Any]:
    try:
        return await episode.run()
    except BaseException as error:
        if must_propagate(error):
            raise
        # A fault of ours, or an exception that nothing expects to be raised, must cost one
        # trajectory, not the batch.
        logger.exception("a trajectory ended by an unexpected error")
        return episode.lost(error)


def _pause_s(failures: int) -> float:
    return random.uniform(0.5, 1.0) * min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S)
