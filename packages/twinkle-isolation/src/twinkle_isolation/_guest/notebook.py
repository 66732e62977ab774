"""The loop of a Python session that shows values as a notebook does.

Every value, figure and exception is one line of JSON on the report descriptor; see
`PythonSession.start`.
"""

from __future__ import annotations

import base64
import builtins
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

from twinkle_isolation._guest import figures, repl

__all__ = ["main"]

_REPRESENTATIONS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
_dumps, _write = json.dumps, os.write  # the code may replace these in their modules


def main() -> None:
    """Serve requests until the control channel closes."""
    send = _sender(int(os.environ.pop("TWINKLE_REPORT_FD")))

    def show(value: object, *, main: bool) -> None:
        send({"main": main, "data": _bundle(value)})

    def display(*values: object, **_: object) -> None:
        """Show values as the results of this piece of code."""
        for value in values:
            show(value, main=False)

    def on_value(value: object) -> None:
        if value is not None:
            builtins._ = value  # pyright: ignore[reportAttributeAccessIssue]
            show(value, main=True)

    def on_error(error: BaseException, text: str) -> None:
        try:
            value = str(error)
        except Exception as failed:
            value = f"<no text: {type(failed).__name__}>"
        send({"error": {"name": type(error).__name__, "value": value, "traceback": text}})

    sys.displayhook = on_value
    builtins.display = display  # pyright: ignore[reportAttributeAccessIssue]
    figures.install(lambda png: send({"main": False, "data": png}))
    repl.main(on_error=on_error, after=figures.show)


def _sender(fd: int) -> Callable[[dict[str, Any]], None]:
    lock = threading.RLock()

    def send(record: dict[str, Any]) -> None:
        # A line break before it too: an interrupt may have cut the last one off.
        data = memoryview(f"\n{_dumps(record, default=repr, skipkeys=True)}\n".encode())
        with lock:
            while data:
                data = data[_write(fd, data) :]

    return send


def _bundle(value: Any) -> dict[str, Any]:
    """Return what a value looks like, by media type; binary data is in base64."""
    made = _call(value, "_repr_mimebundle_")
    bundle: dict[str, Any] = dict(made) if isinstance(made, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    for kind, method in _REPRESENTATIONS.items():
        if kind not in bundle:
            made = _call(value, method)
            if made is not None:
                bundle[kind] = made
    bundle |= figures.bundle(value)
    if type(value).__name__ == "DataFrame" and hasattr(value, "to_dict"):
        bundle["e2b/data"] = value.to_dict(orient="list")
    bundle.setdefault("text/plain", repr(value))
    return {
        str(kind): base64.b64encode(made).decode() if isinstance(made, bytes) else made
        for kind, made in bundle.items()
    }


def _call(value: Any, method: str) -> Any:
    """Return what a display method of a value makes; one that fails makes nothing."""
    kind = cast("Any", type(value))
    if isinstance(value, type) or not callable(getattr(kind, method, None)):
        return None
    try:
        made: Any = getattr(value, method)()
    except Exception:
        return None
    if isinstance(made, tuple):  # the data, and metadata that is not kept
        return next(iter(cast("tuple[Any, ...]", made)), None)
    return made
