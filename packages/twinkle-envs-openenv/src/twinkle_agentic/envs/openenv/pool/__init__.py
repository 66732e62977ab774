"""Embedded environments, sharded over Ray workers or held in this process."""

from __future__ import annotations

from twinkle_agentic.envs.openenv.pool._adapter import EnvPoolAdapter
from twinkle_agentic.envs.openenv.pool._pool import EnvPool
from twinkle_agentic.envs.openenv.pool._stats import WorkerStats

__all__ = ["EnvPool", "EnvPoolAdapter", "WorkerStats"]
