"""What decides the results of a run, kept beside them so that another run can go on with them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from math import isfinite
from pathlib import Path
from typing import Any, Self, cast

from twinkle_agentic.rollout.cli.guards import defect_of
from twinkle_agentic.rollout.cli.options import RunOptions
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.tasks import sample_mark
from twinkle_agentic.rollout.export import json_line, write_jsonl
from twinkle_agentic.tools.types import Trajectory

__all__ = ["RunRecord", "scored_rows", "trace_names"]

# Results that differ in one of these are not of one run. Limits of time are not among them, except
# the deadline: what it cuts has a reward.
_DECIDES = (
    "env",
    "model",
    "samples",
    "max_turns",
    "max_tokens",
    "temperature",
    "top_p",
    "stop",
    "tool_choice",
    "extra_body",
    "deadline_s",
    "tokens",
)
# What the summary reads of a kept trajectory, where it is there.
_KINDS = {"turns": int, "attempts": int, "timing": dict, "failed_steps": list}
_AGAIN = "choose another --out, or pass --overwrite to start anew"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The settings and the tasks of a run: results that differ in them do not belong together.

    Attributes:
        settings: What decides how a trajectory comes out (env, model, limits), by name. JSON.
        tasks: A digest of all tasks, in their order, each once.
        source: A digest of the file of the user's own env, if there is one. A difference is a
            warning, not a refusal: it may be the repair of what failed.
        facts: For the reader: when, with which versions, and all options, URLs included.
    """

    settings: Mapping[str, Any]
    tasks: str
    source: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(
        cls, tasks: Sequence[Trajectory], options: RunOptions, source: Path | None = None
    ) -> Self:
        """Make the record of a run that is about to start.

        Raises:
            OSError: The file `source` cannot be read.
        """
        digest = hashlib.sha256()
        for task in tasks:
            digest.update(json_line(task).encode())
        file = None if source is None else hashlib.sha256(source.read_bytes()).hexdigest()
        return cls(
            {name: getattr(options, name) for name in _DECIDES},
            digest.hexdigest(),
            file,
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "versions": {"python": platform.python_version(), **_versions()},
                "options": options.recorded(),
            },
        )

    def write(self, path: Path) -> None:
        """Write it as one JSON object, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        decides = {"settings": self.settings, "tasks": self.tasks, "source": self.source}
        write_jsonl(path, [decides | dict(self.facts)])

    def check(self, path: Path) -> str | None:
        """Compare with the record of the run whose results are to be kept.

        Returns:
            A difference to warn of; `None` for none.

        Raises:
            RefusedError: There is no record, or it differs; the message says in what.
            OSError: It cannot be read.
        """
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            settings, tasks = dict(found["settings"]), found["tasks"]
            source = found.get("source", self.source)
        except FileNotFoundError as error:
            raise RefusedError(
                f"--resume: there is no {path} that says how the results there came about: {_AGAIN}"
            ) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RefusedError(f"--resume: {path} is no record of a run: {_AGAIN}") from error
        for name in [*self.settings, *(settings.keys() - self.settings.keys())]:
            was, now = settings.get(name), self.settings.get(name)
            grows = name == "samples" and isinstance(was, int) and was < (now or 0)
            if was != now and not grows:
                option = f"--{name.replace('_', '-')}"
                raise RefusedError(
                    f"--resume: the results in {path.parent} were made with {option} {was}, asked "
                    f"for is {now}: {_AGAIN}"
                )
        if tasks != self.tasks:
            raise RefusedError(
                f"--resume: the results in {path.parent} answer other tasks than the file has "
                f"now: {_AGAIN}"
            )
        if source == self.source:
            return None
        return (
            f"the file of --env {self.settings.get('env')} has changed since the results in "
            f"{path.parent} were made: --resume keeps their rewards, --overwrite makes all anew"
        )


def scored_rows(path: Path, *, samples: int = 1) -> dict[str, dict[str, Any]]:
    """Read the trajectories of an earlier run whose reward says something, by `id`.

    Args:
        path: JSON Lines. A last line that was cut in the middle is left out.
        samples: Above 1, the trajectories of a run of one sample are named as its first.

    Raises:
        RefusedError: Another line is no trajectory.
        OSError: The file cannot be read.
    """
    rows: dict[str, dict[str, Any]] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            reward, name = row["reward"], str(row["id"])
            finite = type(reward) in (int, float) and isfinite(reward)
            if not (finite or reward is None) or any(
                field in row and not isinstance(row[field], kind) for field, kind in _KINDS.items()
            ):
                raise ValueError("this is not what a run writes")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if number == len(lines):  # a killed run wrote no further
                continue
            raise RefusedError(
                f"--resume: {path}, line {number} is no trajectory: {_AGAIN}"
            ) from error
        if samples > 1 and "sample" not in row:
            row |= sample_mark(name, 0)
            name = row["id"]
        if reward is not None and defect_of(row) is None:
            rows[name] = cast("dict[str, Any]", row)
    return rows


def _versions() -> dict[str, str]:
    """Return the versions of what plays the episodes."""
    found = {dist.metadata["Name"]: dist.version for dist in distributions()}
    wanted = ("aiohttp", "e2b", "openenv", "ray", "websockets")
    return {n: v for n, v in sorted(found.items()) if n.startswith("twinkle-") or n in wanted}


def trace_names(rows: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the names of the trace files of these trajectories."""
    return {os.path.basename(str(row.get("trace_path") or "")) for row in rows.values()}
