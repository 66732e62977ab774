"""Figures of matplotlib as PNG, where matplotlib is installed. It is also the backend of pyplot."""

from __future__ import annotations

import base64
import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["bundle", "install", "show"]

_BACKEND = "twinkle_figures"
_shown: list[object] = []
_send: list[Callable[[dict[str, Any]], None]] = []


def install(send: Callable[[dict[str, Any]], None]) -> None:
    """Make this module the backend that pyplot takes when it is imported.

    Args:
        send: Takes the bundle of each figure.
    """
    _send.append(send)
    sys.modules[_BACKEND] = sys.modules[__name__]
    os.environ.setdefault("MPLBACKEND", f"module://{_BACKEND}")


def show(*args: object, **kwargs: object) -> None:
    """Send every open figure that was not shown yet, and close them all."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not hasattr(pyplot, "get_fignums"):  # being imported, or failed to
        return
    try:
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            if not any(figure is other for other in _shown):
                _send[0](bundle(figure))
    finally:
        _shown.clear()
        pyplot.close("all")


def bundle(value: Any) -> dict[str, Any]:
    """Return the picture of a figure; of anything else, nothing."""
    module = sys.modules.get("matplotlib.figure")
    if module is None or not isinstance(value, module.Figure):
        return {}
    data = io.BytesIO()
    value.savefig(data, format="png", bbox_inches="tight")
    _shown.append(value)
    return {"image/png": base64.b64encode(data.getvalue()).decode(), "text/plain": repr(value)}


def __getattr__(name: str) -> Any:
    """Give pyplot what it asks of a backend: the canvas of Agg, imported only then."""
    if name != "FigureCanvas":
        raise AttributeError(name)
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    globals()[name] = agg.FigureCanvasAgg
    return agg.FigureCanvasAgg
