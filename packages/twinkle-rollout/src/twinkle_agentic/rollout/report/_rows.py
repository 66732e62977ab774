"""The trajectories of one run, read from its folder line by line."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

__all__ = [
    "Run",
    "RunNotFoundError",
    "calls_of",
    "group_of",
    "messages_of",
    "parts_of",
    "tool_names",
]

_RESULT = "trajectories.jsonl"
_LARGEST_IMAGE_BYTES = 8 << 20


class RunNotFoundError(FileNotFoundError):
    """There is no result at the path: neither a run folder nor a file of trajectories."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run on disk.

    Attributes:
        name: What the page calls it: the folder's name.
        file: JSON Lines, one `FinishedTrajectory` a line.
        record: What `run.json` says of it; empty where there is none.
        unfinished: The file is the part file of a run that has not ended, or was cut short.
    """

    name: str
    file: Path
    record: Mapping[str, Any]
    unfinished: bool

    @classmethod
    def open(cls, path: Path) -> Run:
        """Find the result at `path`: a run folder, or a file of trajectories.

        Raises:
            RunNotFoundError: There is none.
        """
        if path.is_file():
            return cls(path.stem, path, {}, unfinished=path.suffix == ".part")
        for name in (_RESULT, f"{_RESULT}.part"):
            file = path / name
            if file.is_file():
                record = _read_record(path / "run.json")
                return cls(path.resolve().name, file, record, unfinished=name != _RESULT)
        found = "no such file or folder" if not path.exists() else f"no {_RESULT} in it"
        raise RunNotFoundError(f"{path}: {found}: give the folder that `run --out` wrote")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the trajectories in file order; images beside the file are put in as data URLs.

        The last line of an unfinished run may be half written and is left out.

        Raises:
            ValueError: A line is not a JSON object.
        """
        with self.file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    if self.unfinished and not line.endswith("\n"):
                        return
                    raise ValueError(f"{self.file}, line {number}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{self.file}, line {number}: not a JSON object")
                yield self._with_images(cast("dict[str, Any]", row))

    def _with_images(self, row: dict[str, Any]) -> dict[str, Any]:
        for message in messages_of(row):
            for part in parts_of(message):
                image: Any = part.get("image_url")
                if image and isinstance(image.get("url"), str):
                    image["url"] = self._image(image["url"])
        return row

    def _image(self, url: str) -> str:
        if url.startswith(("data:", "http:", "https:")):
            return url
        folder = self.file.parent.resolve()
        path = (folder / url).resolve()
        # Only files of the run: a path in a message is the environment's, not the user's.
        if not path.is_relative_to(folder) or not path.is_file():
            return url
        if path.stat().st_size > _LARGEST_IMAGE_BYTES:
            return url
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def group_of(row: Mapping[str, Any]) -> str | None:
    """Return the group of a trajectory: the samples of one task. `None` where there are none."""
    if row.get("group_id") is not None:
        return str(row["group_id"])
    return str(row["task"]) if "sample" in row else None


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a trajectory."""
    messages: list[dict[str, Any]] = row.get("messages") or []
    return messages


def parts_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the content of a message as parts: `text`, `image_url`."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return cast("list[dict[str, Any]]", content)
    return [{"type": "text", "text": str(content)}] if content else []


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the tool calls of a message: the name, and the arguments as the model wrote them."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    functions: list[dict[str, Any]] = [call.get("function") or {} for call in calls]
    return [(str(one.get("name")), one.get("arguments")) for one in functions]


def tool_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the tools that the model called, in the order of their first call."""
    called = (name for message in messages_of(row) for name, _ in calls_of(message))
    return list(dict.fromkeys(called))


def _read_record(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("Mapping[str, Any]", record) if isinstance(record, dict) else {}
