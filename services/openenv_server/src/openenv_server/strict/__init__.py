"""The stock interpreter, held to Python."""

from __future__ import annotations

from openenv_server.strict.executor import StrictExecutor

__all__ = ["StrictExecutor"]
