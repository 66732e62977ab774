"""Where a run leaves its trajectories."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from twinkle_agentic.rollout._files import whole_file
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.run_record import RunRecord, scored_rows, trace_names
from twinkle_agentic.rollout.export import json_line, write_jsonl
from twinkle_agentic.tools.types import Trajectory

__all__ = ["RunOutput"]


class RunOutput:
    """The output folder of one run, a context manager; inside it no other run has the folder.

    Finished trajectories are appended to `trajectories.jsonl.part` as they end, so an interrupted
    run loses none. `finish` writes `trajectories.jsonl` in the order of the tasks, whole or not at
    all, and removes the part file.

    Args:
        folder: Made when the context is entered.
        record: What decides the results, written to `run.json`; a run without one cannot be
            resumed.
        overwrite: Replace the result of an earlier run, its traces included.
        resume: Keep what an earlier run with the same record has scored, where there is one.

    Attributes:
        kept: Trajectories of the earlier run, by `id`; known once the context is entered.
        warning: What the user should know of them, if anything.

    Raises:
        RefusedError: On entering: another run has the folder, there is a result already (to resume:
            one with another record), or the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        record: RunRecord | None = None,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.folder = folder
        self.path = folder / "trajectories.jsonl"
        self.record_path = folder / "run.json"
        self.part = folder / "trajectories.jsonl.part"
        self.kept: dict[str, dict[str, Any]] = {}
        self.warning: str | None = None
        self._record = record
        self._overwrite = overwrite
        self._resume = resume
        self._lock = FileLock(folder / ".lock")
        self._file: FileIO | None = None
        self._spoilt = False
        self._writing = threading.Lock()

    @property
    def traces(self) -> Path:
        """The folder of one JSON file a trajectory, with everything that was said."""
        return self.folder / "traces"

    @property
    def resumable(self) -> bool:
        """Whether a later run can go on with this one."""
        return self._record is not None

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self.kept = self.check()
            self._take_over()
            self._file = self.part.open("ab", buffering=0)
        except OSError as error:
            self._lock.release()
            raise RefusedError(f"cannot write to {self.folder}: {error.strerror}") from error
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a network file system
                self._file.close()
            self._file = None
        # An empty one says, beside an earlier result, that this run does not go on with that.
        if self.part.exists() and not self.part.stat().st_size and not self.path.exists():
            self.part.unlink()
        self._lock.release()

    def _take_lock(self) -> None:
        """Take the lock at once or not at all; the kernel ends it with the process."""
        path = Path(self._lock.lock_file)
        holder = path.read_text("utf-8", "replace") if path.exists() else ""
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RefusedError(
                f"{self.folder} is in use by {holder or 'another run'}: choose another --out, or "
                "wait until that run has ended"
            ) from error
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def check(self) -> dict[str, dict[str, Any]]:
        """Read what an earlier run has scored, where this one goes on with it.

        Raises:
            RefusedError: There is a result that this run must neither replace nor go on with.
        """
        # What a run that did not end has kept of an earlier result is in its part file, too.
        earlier = next((path for path in (self.part, self.path) if path.exists()), None)
        if earlier is None or self._overwrite or self._holds_nothing():
            return {}
        if not self._resume or self._record is None:
            or_go_on = "" if self._record is None else ", or --resume to go on with it"
            raise RefusedError(
                f"{earlier} is there already: choose another --out, or pass --overwrite{or_go_on}"
            )
        changed = self._record.check(self.record_path)
        kept = scored_rows(earlier, samples=self._record.settings.get("samples", 1))
        self.warning = changed if kept else None
        return kept

    def _holds_nothing(self) -> bool:
        """Tell whether all that is there is the mark of a run that was killed at its start."""
        return not self.path.exists() and not self.part.stat().st_size

    def _take_over(self) -> None:
        began = self.part.exists()
        # Before the record: a kill between the two must not leave results beside a record that they
        # were not made by. From here on the part file stands for what is kept of them.
        write_jsonl(self.part, self.kept.values())
        try:
            if self._record is None:
                self.record_path.unlink(missing_ok=True)  # of another run
            else:
                self._record.write(self.record_path)
        except OSError:
            if not began:  # the run is refused, so an earlier result stands as it did
                self.part.unlink()
            raise
        self._clear_unfinished()

    def _clear_unfinished(self) -> None:
        """Remove what other runs left: files without their final names, and traces."""
        for pattern in (".trajectories.jsonl.*.part", ".run.json.*.part", "traces/.*.json*.part"):
            for unfinished in self.folder.glob(pattern):
                unfinished.unlink()
        self.traces.mkdir(exist_ok=True)
        kept = trace_names(self.kept)
        for old in self.traces.glob("*.json"):
            if old.name not in kept:
                old.unlink()

    def write_config(self, text: str) -> None:
        """Write the options of the run as `config.toml`, where it can be written."""
        with contextlib.suppress(OSError), whole_file(self.folder / "config.toml") as file:
            file.write(text)

    def left(self, tasks: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the tasks that the earlier run has not scored, in their order."""
        return [task for task in tasks if _id_of(task) not in self.kept]

    def result(self, task: Trajectory, fresh: Mapping[str, Any]) -> Any:
        """Return the trajectory of a task, kept or in `fresh` (by id); `None` for none."""
        name = _id_of(task)
        return self.kept.get(name) or fresh.get(name)

    def add(self, trajectory: Any) -> None:
        """Append one finished trajectory to the part file, where it can be written. Thread-safe."""
        with self._writing:
            self._append(json_line(trajectory).encode())

    def _append(self, line: bytes) -> None:
        if self._file is None or self._spoilt:
            return
        start = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError:  # a full disk may have room again; `finish` tries with all of them
            try:
                self._file.truncate(start)
            except OSError:  # nothing may follow half a line
                self._spoilt = True

    def finish(self, trajectories: Sequence[Any]) -> None:
        """Write all trajectories in order and remove the part file.

        Raises:
            OSError: They cannot be written; the part file stays.
        """
        write_jsonl(self.path, trajectories)
        self.part.unlink(missing_ok=True)


def _id_of(task: Mapping[str, Any]) -> str:
    return str(task.get("id"))
