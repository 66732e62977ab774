"""Embedded environments, sharded over Ray workers or held in this process."""

from __future__ import annotations

from twinkle_agentic.envs.openenv.pool.adapter import EnvPoolAdapter
from twinkle_agentic.envs.openenv.pool.env_pool import EnvPool
from twinkle_agentic.envs.openenv.pool.stats import WorkerStats

__all__ = ["EnvPool", "EnvPoolAdapter", "WorkerStats"]
