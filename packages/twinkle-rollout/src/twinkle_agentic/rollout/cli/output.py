"""Where a run leaves its trajectories."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from twinkle_agentic.rollout.cli.folder_lock import FolderLock
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.export import json_line, write_jsonl

__all__ = ["RunOutput"]


class RunOutput:
    """The output folder of one run, a context manager; inside it no other run has the folder.

    Finished trajectories are appended to `trajectories.jsonl.part` as they end, so an interrupted
    run loses none. `finish` writes `trajectories.jsonl` in the order of the tasks, whole or not at
    all, and removes the part file.

    Args:
        folder: Made when the context is entered.
        overwrite: Replace the result of an earlier run, its traces included.

    Raises:
        RefusedError: On entering: another run has the folder, there is a result already, or the
            folder cannot be made.
    """

    def __init__(self, folder: Path, *, overwrite: bool = False) -> None:
        self.folder = folder
        self.path = folder / "trajectories.jsonl"
        self.part = folder / "trajectories.jsonl.part"
        self._overwrite = overwrite
        self._lock = FolderLock(folder)
        self._file: FileIO | None = None
        self._full = False

    @property
    def traces(self) -> Path:
        """The folder of one JSON file a trajectory, with everything that was said."""
        return self.folder / "traces"

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self._check_earlier()
            self.traces.mkdir(exist_ok=True)
            for old in self.traces.glob("*.json"):  # of the run that this one replaces
                old.unlink()
            self._file = self.part.open("wb", buffering=0)
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
        if self.part.exists() and self.part.stat().st_size == 0:  # nothing was finished
            self.part.unlink()
        self._lock.release()

    def _check_earlier(self) -> None:
        if self._overwrite:
            return
        for path in (self.path, self.part):
            if path.exists():
                raise RefusedError(
                    f"{path} is there already: choose another --out, or pass --overwrite"
                )

    def add(self, trajectory: Any) -> None:
        """Append one finished trajectory to the part file, as long as it can be written."""
        if self._file is None or self._full:
            return
        line = json_line(trajectory).encode()
        start = self._file.tell()
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError:  # `finish` tries with all of them, and says why it cannot
            self._full = True
            with contextlib.suppress(OSError):
                self._file.truncate(start)  # half a line would spoil the others

    def finish(self, trajectories: Sequence[Any]) -> None:
        """Write all trajectories in order and remove the part file.

        Raises:
            OSError: They cannot be written; the part file stays.
        """
        write_jsonl(self.path, trajectories)
        self.part.unlink(missing_ok=True)
