"""The output folder: nothing half-written, nothing lost, nothing overwritten unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.refusal import RefusedError


def test_finish_writes_all_in_order_and_removes_the_part(tmp_path: Path) -> None:
    output = RunOutput(tmp_path / "run")
    with output:
        output.add({"id": "b"})
        output.add({"id": "a"})
        output.finish([{"id": "a"}, {"id": "b", "text": "é\ud800"}])
    rows = [json.loads(line) for line in output.path.read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == ["a", "b"]
    assert sorted(p.name for p in output.folder.iterdir()) == ["traces", "trajectories.jsonl"]


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    output = RunOutput(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), output:
        output.add({"id": "a"})
        raise KeyboardInterrupt
    assert json.loads(output.part.read_text()) == {"id": "a"}
    assert not output.path.exists()


def test_an_earlier_result_is_refused_unless_told(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text("{}\n")
    with pytest.raises(RefusedError, match="--overwrite"):
        RunOutput(tmp_path)
    with RunOutput(tmp_path, overwrite=True) as output:
        output.finish([{"id": "new"}])
    assert json.loads(output.path.read_text()) == {"id": "new"}


def test_overwriting_removes_the_traces_of_the_earlier_run(tmp_path: Path) -> None:
    with RunOutput(tmp_path) as output:
        (output.traces / "ok-old.json").write_text("{}")
        output.finish([])
    with RunOutput(tmp_path, overwrite=True) as output:
        assert list(output.traces.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="cannot write"), RunOutput(tmp_path / "file" / "run"):
        pass
