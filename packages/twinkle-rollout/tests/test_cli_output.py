"""The output folder: nothing half-written, nothing lost, nothing overwritten unasked."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.run_record import RunRecord


def names(folder: Path) -> list[str]:
    """What is in a folder, without the lock file, which stays."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_finish_writes_all_in_order_and_removes_the_part(tmp_path: Path) -> None:
    output = RunOutput(tmp_path / "run")
    with output:
        output.add({"id": "b"})
        output.add({"id": "a"})
        output.finish([{"id": "a"}, {"id": "b", "text": "é\ud800"}])
    rows = [json.loads(line) for line in output.path.read_text("utf-8").splitlines()]
    assert [row["id"] for row in rows] == ["a", "b"]
    assert names(output.folder) == ["traces", "trajectories.jsonl"]


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    output = RunOutput(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), output:
        output.add({"id": "a"})
        raise KeyboardInterrupt
    assert json.loads(output.part.read_text()) == {"id": "a"}
    assert not output.path.exists()


def test_a_part_that_cannot_grow_ends_with_a_whole_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    row = {"text": "x" * 300}
    with RunOutput(tmp_path) as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            for _ in range(5):
                output.add(row)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        output.add(row)  # there is room again
    assert [json.loads(line) for line in output.part.read_text().splitlines()] == [row] * 4


def test_ctrl_c_before_the_command_is_known_is_no_traceback() -> None:
    script = """
import signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        if name.endswith("cli.app"):
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Early())
from twinkle_agentic.rollout.cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_an_earlier_result_is_refused_unless_told(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text("{}\n")
    with pytest.raises(RefusedError, match="--overwrite"), RunOutput(tmp_path):
        pass
    with RunOutput(tmp_path, overwrite=True) as output:
        output.finish([{"id": "new"}])
    assert json.loads(output.path.read_text()) == {"id": "new"}


def test_overwriting_removes_the_traces_of_the_earlier_run(tmp_path: Path) -> None:
    with RunOutput(tmp_path) as output:
        (output.traces / "ok-old.json").write_text("{}")
        output.finish([])
    with RunOutput(tmp_path, overwrite=True) as output:
        assert list(output.traces.iterdir()) == []


RECORD = RunRecord({"max_turns": 6}, "digest")


_ODD = [b'"turns": null', b'"timing": 5', b'"failed_steps": 5', b'"attempts": null']
_SPOILT = [
    *(b'{"id": "a", "reward": 1.0, %s}' % field for field in _ODD),
    *(b"{", b"[]", b'{"id": "a"}', b"\xff", b'{"reward": 1.0}', b"[" * 100_000),
    *(b'{"id": "a", "reward": %s}' % reward for reward in (b"NaN", b'"1.0"', b"true", b"[1.0]")),
]


@pytest.mark.parametrize("line", _SPOILT, ids=lambda line: line[:30])
def test_a_result_that_cannot_be_read_is_not_resumed(tmp_path: Path, line: bytes) -> None:
    with RunOutput(tmp_path, record=RECORD) as output:
        output.add({"id": "a", "reward": 1.0})
    spoilt = line + b"\n" + output.part.read_bytes()
    output.part.write_bytes(spoilt)
    refused = pytest.raises(RefusedError, match=r"part, line 1 is no trajectory: .*--overwrite")
    with refused, RunOutput(tmp_path, record=RECORD, resume=True):
        pass
    assert output.part.read_bytes() == spoilt


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"settings": 1}', '{"settings": {}}'])
def test_a_record_that_cannot_be_read_is_not_taken_for_the_same(tmp_path: Path, text: str) -> None:
    with RunOutput(tmp_path, record=RECORD) as output:
        output.finish([{"id": "a", "reward": 1.0}])
    (tmp_path / "run.json").write_text(text)
    refused = pytest.raises(RefusedError, match="is no record of a run")
    with refused, RunOutput(tmp_path, record=RECORD, resume=True):
        pass


def test_a_change_of_the_users_env_is_told(tmp_path: Path) -> None:
    def record(text: str) -> RunRecord:
        return RunRecord({"env": "env:Env"}, "digest", text)

    with RunOutput(tmp_path, record=record("a")) as output:
        output.finish([{"id": "a", "reward": 1.0}])
    with RunOutput(tmp_path, record=record("a"), resume=True) as output:
        assert output.warning is None
    with RunOutput(tmp_path, record=record("b"), resume=True) as output:
        assert output.warning is not None
        assert "--env env:Env has changed since" in output.warning
        assert list(output.kept) == ["a"]


def test_a_setting_that_only_the_earlier_run_had_is_a_difference(tmp_path: Path) -> None:
    other = RunRecord({**RECORD.settings, "min_p": 0.1}, RECORD.tasks)
    with RunOutput(tmp_path, record=other) as output:
        output.finish([{"id": "a", "reward": 1.0}])
    refused = pytest.raises(RefusedError, match=r"--min-p 0\.1, asked for is None")
    with refused, RunOutput(tmp_path, record=RECORD, resume=True):
        pass


def test_an_overwriting_run_that_was_cut_short_is_not_resumed_with_the_older_result(
    tmp_path: Path,
) -> None:
    with RunOutput(tmp_path, record=RECORD) as output:
        output.finish([{"id": "a", "reward": 1.0}])
    with (
        pytest.raises(KeyboardInterrupt),
        RunOutput(tmp_path, record=RECORD, overwrite=True),
    ):
        raise KeyboardInterrupt
    assert json.loads(output.path.read_text())["id"] == "a"  # until there is another
    with RunOutput(tmp_path, record=RECORD, resume=True) as resumed:
        assert resumed.kept == {}


_KILLED = """
import os, signal, sys
from pathlib import Path
from twinkle_agentic.rollout.cli.output import RunOutput
from twinkle_agentic.rollout.cli.run_record import RunRecord

base, count = Path(sys.argv[1]), 0

def record(name):
    return RunRecord({"model": name}, "digest")

def play(folder, name, **options):
    with RunOutput(folder, record=record(name), **options) as output:
        row = {"id": "a", "reward": 1.0, "model": name}
        output.add(row)
        output.finish([row])

def kill_at(last, folder):
    def hook(event, args):
        global count
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(folder) in str(args):
            count += 1
            if count == last:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for last in range(1, 100):
    folder = base / str(last)
    play(folder, "old")
    child = os.fork()
    if child == 0:
        kill_at(last, folder)
        play(folder, "new", overwrite=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""


def test_a_kill_at_any_moment_leaves_no_result_beside_the_record_of_another(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=True, timeout=100)
    folders = list(tmp_path.iterdir())
    assert len(folders) > 5
    for folder in folders:
        record = RunRecord({"model": "new"}, "digest")
        with (
            contextlib.suppress(RefusedError),
            RunOutput(folder, record=record, resume=True) as output,
        ):
            assert {row["model"] for row in output.kept.values()} <= {"new"}
        with RunOutput(folder, overwrite=True) as output:
            output.finish([])
        assert names(folder) == ["traces", "trajectories.jsonl"]


def test_a_run_that_was_killed_at_its_start_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl.part").write_text("")
    with RunOutput(tmp_path, record=RECORD, resume=True) as output:
        output.finish([{"id": "a", "reward": 1.0}])
    (tmp_path / "trajectories.jsonl.part").write_text("")
    refused = pytest.raises(RefusedError, match="--overwrite")
    with refused, RunOutput(tmp_path, record=RECORD):
        pass


def test_an_overwriting_run_that_cannot_start_leaves_the_earlier_result_as_it_was(
    tmp_path: Path,
) -> None:
    with RunOutput(tmp_path, record=RECORD) as output:
        (output.traces / "ok-a.json").write_text("{}")
        row = {"id": "a", "reward": 1.0, "trace_path": str(output.traces / "ok-a.json")}
        output.finish([row])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        refused = pytest.raises(RefusedError, match="cannot write")
        with refused, RunOutput(tmp_path, record=RECORD, overwrite=True):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with RunOutput(tmp_path, record=RECORD, resume=True) as output:
        assert output.kept == {"a": row}
        assert (output.traces / "ok-a.json").exists()


def test_a_trace_that_a_killed_run_was_writing_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces/.ok-a.json.part").write_text("{")
    with RunOutput(tmp_path) as output:
        assert list(output.traces.iterdir()) == []


def test_a_result_without_a_record_takes_the_place_of_one_that_had_one(tmp_path: Path) -> None:
    with RunOutput(tmp_path, record=RECORD) as output:
        output.finish([{"id": "a", "reward": 1.0}])
    with RunOutput(tmp_path, overwrite=True) as output:
        output.finish([{"id": "a", "reward": 0.0}])
    refused = pytest.raises(RefusedError, match=r"no .*run\.json")
    with refused, RunOutput(tmp_path, record=RECORD, resume=True):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="cannot write"), RunOutput(tmp_path / "file" / "run"):
        pass


def test_a_second_run_in_the_folder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with RunOutput(tmp_path) as output:
        output.add({"id": "a"})
        (output.traces / "ok-a.json").write_text("{}")
        for overwrite in (False, True):
            with (
                pytest.raises(RefusedError, match=f"in use by process {os.getpid()} on .*--out"),
                RunOutput(tmp_path, overwrite=overwrite),
            ):
                pass
        output.finish([{"id": "a"}])
    assert json.loads(output.path.read_text()) == {"id": "a"}
    assert [path.name for path in output.traces.iterdir()] == ["ok-a.json"]
    with RunOutput(tmp_path, overwrite=True) as again:  # the folder is free again
        again.finish([])


_HOLD = """
import os, signal, sys
from pathlib import Path
from twinkle_agentic.rollout.cli.output import RunOutput
with RunOutput(Path(sys.argv[1])) as output:
    output.add({"id": "a"})
    if sys.argv[2] == "fork" and os.fork() == 0:  # as an env may
        signal.pause()
    if sys.argv[2] == "pause":
        print("holding", flush=True)
        signal.pause()
print("over", flush=True)
signal.pause()
"""


@contextlib.contextmanager
def holder(folder: Path, how: str, says: str) -> Generator[int]:
    """A process that has the folder; inside the block it has said how far it is."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder), how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{says}\n"
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_lock_of_a_killed_run_goes_with_it(tmp_path: Path) -> None:
    with holder(tmp_path, "pause", "holding") as pid:
        refused = pytest.raises(RefusedError, match=f"in use by process {pid} ")
        with refused, RunOutput(tmp_path, overwrite=True):
            pass
    with RunOutput(tmp_path, overwrite=True) as output:
        output.finish([])
    assert names(tmp_path) == ["traces", "trajectories.jsonl"]


def test_a_child_that_an_env_forked_does_not_keep_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path, "fork", "over"), RunOutput(tmp_path, overwrite=True) as output:
        output.finish([])
    assert output.path.exists()


def test_a_run_that_finishes_nothing_leaves_no_part(tmp_path: Path) -> None:
    with RunOutput(tmp_path):
        pass
    with RunOutput(tmp_path):  # so the next one needs no --overwrite
        pass
