"""`openenv`, loaded without its web interface.

`openenv.core` imports gradio, which pulls in pandas and takes half of the server's start, though
it serves nothing unless `ENABLE_WEB_INTERFACE` is set. `openenv` treats gradio as optional: where
it cannot be imported, the web interface is off. So it is hidden while `openenv` loads. Afterwards
gradio imports as usual, and `create_app` still makes the interface where it is asked for.

Everything here that needs `openenv` imports it from this module.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI

__all__ = ["Action", "Environment", "Observation", "State", "create_app"]


def _load() -> None:
    wanted = os.environ.get("ENABLE_WEB_INTERFACE", "").lower() in ("true", "1", "yes")
    if wanted or "gradio" in sys.modules or "openenv.core.env_server" in sys.modules:
        return
    modules = cast("dict[str, Any]", sys.modules)
    modules["gradio"] = None  # Python's own way to say: not importable
    try:
        importlib.import_module("openenv.core.env_server")
    finally:
        del modules["gradio"]


if not TYPE_CHECKING:
    _load()

from openenv.core.env_server import http_server  # noqa: E402  # after gradio is hidden
from openenv.core.env_server.interfaces import Environment  # noqa: E402
from openenv.core.env_server.types import Action, Observation, State  # noqa: E402

create_app: Callable[..., FastAPI] = cast("Any", http_server).create_app
"""OpenEnv's `create_app`, whose own type leaves its generics open."""
