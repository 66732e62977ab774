"""A local sandbox server that speaks the E2B protocol."""

from __future__ import annotations

from sandbox_server.app import create_app
from sandbox_server.config import ServerConfig

__all__ = ["ServerConfig", "create_app"]
