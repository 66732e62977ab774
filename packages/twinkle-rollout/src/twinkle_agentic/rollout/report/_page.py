"""One HTML file for one run, or for two side by side. It needs no server and no network.

The page has a small index (one short record per trajectory) that the browser reads at once, and
the trajectories themselves, deflated in chunks, which it unpacks when one is opened or searched.
So a page of thousands of trajectories opens as fast as a small one.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from twinkle_agentic.rollout._files import whole_file
from twinkle_agentic.rollout.report._rows import (
    Run,
    group_of,
    messages_of,
    parts_of,
    tool_names,
)

__all__ = ["write_report"]

_CHUNK_BYTES = 1 << 20  # of JSON before compression: what opening one trajectory unpacks
_COMPRESSION = 4
_SHOWN_ERROR_CHARS = 300  # in the index; the trajectory has the whole text
_SHOWN_TITLE_CHARS = 160


def write_report(runs: Sequence[Run], path: Path) -> int:
    """Write the page of one run, or of two to compare, whole or not at all.

    Args:
        runs: One or two.
        path: The HTML file; replaced where there is one.

    Returns:
        How many trajectories it shows.

    Raises:
        ValueError: No run or more than two, or a line of a file is not a JSON object.
        OSError: A file cannot be read or written.
    """
    if len(runs) not in (1, 2):
        raise ValueError(f"a report shows one run or two, found {len(runs)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as page:
        return _write(page, runs)


def _write(page: IO[str], runs: Sequence[Run]) -> int:
    head, tail = _asset("page.html").split("<!-- data -->")
    title = " and ".join(run.name for run in runs)
    page.write(head.replace("/* css */", _asset("page.css")).replace("{title}", _escaped(title)))
    index: list[dict[str, Any]] = []
    chunk = 0
    for number, run in enumerate(runs):
        for rows in _chunks(run):
            text = f"[{','.join(text for _, text in rows)}]"
            packed = base64.b64encode(zlib.compress(text.encode(), _COMPRESSION)).decode()
            page.write(f'<script type="text/plain" id="chunk-{chunk}">{packed}</script>\n')
            index += [
                _index_entry(row, run=number, chunk=chunk, place=place)
                for place, (row, _) in enumerate(rows)
            ]
            chunk += 1
    described = [
        {"name": run.name, "record": dict(run.record), "unfinished": run.unfinished} for run in runs
    ]
    _write_json(page, "index", {"runs": described, "rows": index, "chunks": chunk})
    page.write(tail.replace("/* js */", _asset("page.js")))
    return len(index)


def _chunks(run: Run) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Yield the trajectories, each with its JSON, as many at a time as make up a chunk."""
    rows: list[tuple[dict[str, Any], str]] = []
    total = 0
    for row in run.rows():
        text = json.dumps(row, separators=(",", ":"))
        if rows and total + len(text) > _CHUNK_BYTES:
            yield rows
            rows, total = [], 0
        rows.append((row, text))
        total += len(text)
    if rows:
        yield rows


def _index_entry(row: Mapping[str, Any], *, run: int, chunk: int, place: int) -> dict[str, Any]:
    """Return what the table, the filters and the plots need of a trajectory."""
    error = row.get("error")
    return {
        "run": run,
        "chunk": chunk,
        "place": place,
        "id": str(row.get("id", place)),
        "group": group_of(row),
        "title": _first_words(row),
        "reward": row.get("reward"),
        "turns": row.get("turns", 0),
        "stop": str(row.get("stop_reason")),
        "error": None if error is None else str(error)[:_SHOWN_ERROR_CHARS],
        "kind": row.get("error_kind"),
        "failed": len(row.get("failed_steps") or ()),
        "tools": tool_names(row),
        "timing": row.get("timing") or {},
        "turn_times": row.get("turn_timings") or [],
        "usage": row.get("usage"),
        "attempts": row.get("attempts", 1),
    }


def _first_words(row: Mapping[str, Any]) -> str:
    for message in messages_of(row):
        if message.get("role") == "user":
            text = " ".join(str(part.get("text", "")) for part in parts_of(message))
            return text[:_SHOWN_TITLE_CHARS]
    return ""


def _write_json(page: IO[str], name: str, value: Any) -> None:
    # `<` cannot end the script element when it is escaped, and JSON reads it back.
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    page.write(f'<script type="application/json" id="{name}">{text}</script>\n')


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _asset(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")
