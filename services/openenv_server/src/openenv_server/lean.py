"""Load `openenv` without its web interface.

`openenv.core` imports gradio, which pulls in pandas and takes two thirds of the server's start,
though it serves nothing unless `ENABLE_WEB_INTERFACE` is set. `openenv` treats gradio as optional:
where it cannot be imported, the web interface is off.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, cast

__all__ = ["load_openenv"]


def load_openenv() -> None:
    """Import `openenv.core.env_server`, without gradio where nobody asked for it.

    Gradio can be imported as usual afterwards. Does nothing where `openenv` or gradio is loaded.
    """
    wanted = os.environ.get("ENABLE_WEB_INTERFACE", "").lower() in ("true", "1", "yes")
    if wanted or "gradio" in sys.modules or "openenv.core.env_server" in sys.modules:
        return
    modules = cast("dict[str, Any]", sys.modules)
    modules["gradio"] = None  # Python's own way to say: not importable
    try:
        importlib.import_module("openenv.core.env_server")
    finally:
        del modules["gradio"]
