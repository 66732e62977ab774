"""Task files: what is taken, and how each fault is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.tasks import read_tasks
from twinkle_agentic.rollout.export import json_line


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_prompt_becomes_a_user_message_with_id_and_data(tmp_path: Path) -> None:
    row = {"prompt": "hi", "id": "a", "system": "be brief", "seed": 3, "user_data": {"x": 1}}
    (task,) = read_tasks(write(tmp_path / "t.jsonl", row, "", "  "))
    assert dict(task) == {
        "id": "a",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ],
        "user_data": {"x": 1, "seed": 3},
    }


def test_messages_are_kept_as_they_are(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (task,) = read_tasks(write(tmp_path / "t.jsonl", {"messages": messages}))
    assert task.get("messages") == messages
    assert dict(task)["id"] == "1"


def test_line_separator_characters_inside_json_do_not_split_a_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert len(read_tasks(path)) == 1


_FAULTS: list[tuple[list[object], str]] = [
    ([{"promt": "x"}], "line 1: unknown column 'promt', did you mean 'prompt'"),
    ([{"prompt": "x"}, "{"], "line 2: no valid JSON"),
    ([[1]], "expected an object, found list"),
    ([{"prompt": 3}], "column 'prompt' must be str, found 3"),
    ([{"prompt": "x", "seed": True}], "column 'seed' must be int"),
    ([{"prompt": "x", "id": "\ud800"}, {"prompt": "y", "id": "\ud801"}], "stands on line 1"),
    ([{"id": "a"}], "give either `prompt` or `messages`"),
    ([{"prompt": "x", "messages": []}], "give either `prompt` or `messages`"),
    ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": "1"}], "id '1' stands on line 1"),
    ([{"messages": ["x"]}], "each message is an object with a `role`"),
    ([], "holds no task"),
    ([{"messages": []}], "`messages` is empty"),
    ([{"messages": [{"role": "usr", "content": "x"}]}], "role 'usr' is none of system"),
    (
        [{"prompt": "x", "tests": "assert x = 1"}],
        "column 'tests': line 1 of the tests: no valid Python",
    ),
    ([{"prompt": "x", "tests": " "}], "column 'tests': they are empty"),
    ([{"prompt": "x", "tests": "-" * 100_000 + "1"}], "column 'tests': no valid Python: "),
    ([{"prompt": "x", "tests": "a" + ".b" * 99_999}], "column 'tests': no valid Python: "),
    (['{"prompt": "x", "prompt": "y"}'], "line 1: no valid JSON: the name 'prompt' stands twice"),
    (['{"prompt": "x", "user_data": {"a": 1, "a": 2}}'], "the name 'a' stands twice"),
    ([{"prompt": "x", "seed": 1, "user_data": {"seed": 2}}], "'seed' is 1 and in `user_data` 2"),
    (
        [{"prompt": "x", "tests": "assert a", "user_data": {"tests": "b"}}],
        "'tests' is 'assert a' and in `user",
    ),
    (
        [{"prompt": "x", "level": 3}],
        "unknown column 'level' (known: id, prompt, mess",
    ),
    ([{"prompt": "x", "level": 3}], "what is yours goes into `user_data`"),
    (
        [{"prompt": "x", "tests": "import math\ndef check():\n    assert add(1, 2) == 3"}],
        "column 'tests': all their checks stand in functions and classes that nothing calls",
    ),
    (
        [{"prompt": "x", "tests": "class Add:\n    def test(self):\n        assert add(1, 2)"}],
        "name them test... or call them",
    ),
    ([{"prompt": "x", "tests": "check = lambda: add(1, 2)"}], "'tests': they have no assert"),
    (
        [{"prompt": "x", "tests": "import math\nrev('ab') == 'ba'"}],
        "line 2 of the tests: `rev('ab') == 'ba'` compares and does nothing with it",
    ),
]


@pytest.mark.parametrize(("rows", "message"), _FAULTS)
def test_a_fault_is_one_line_that_names_the_place(
    tmp_path: Path, rows: list[object], message: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        read_tasks(write(tmp_path / "t.jsonl", *rows))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tests",
    [
        "assert add(1, 2) == 3",
        "def check(f):\n    assert f(1, 2) == 3\ncheck(add)",
        "for n in (1, 2):\n    if add(n, n) != 2 * n:\n        raise ValueError(n)",
        "class Cases:\n    assert add(1, 2) == 3",
        "import math\ndef test_add():\n    assert add(1, 2) == 3",
        "class TestAdd:\n    def test(self):\n        assert add(1, 2)",
    ],
)
def test_tests_that_can_fail_are_taken(tmp_path: Path, tests: str) -> None:
    (task,) = read_tasks(write(tmp_path / "t.jsonl", {"prompt": "x", "tests": tests}))
    assert dict(task)["user_data"] == {"tests": tests}


def test_a_needed_column_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="needs the column 'tests'"):
        read_tasks(write(tmp_path / "t.jsonl", {"prompt": "x"}), needs=("tests",))


def test_a_column_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    row = {"prompt": "x", "tests": "assert 1"}
    with pytest.raises(RefusedError, match="does not read the column 'tests'"):
        read_tasks(write(tmp_path / "t.jsonl", row), ignores=("tests",))


def test_an_id_is_what_the_output_will_have(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "x", "id": "\\ud800"}\n')
    (task,) = read_tasks(path)
    assert json.loads(json_line(task))["id"] == dict(task)["id"]


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    assert len(read_tasks(tmp_path / "t.jsonl")) == 1


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="No such file"):
        read_tasks(tmp_path / "absent.jsonl")
    (tmp_path / "b").write_bytes(b"\xff\xfe")
    with pytest.raises(RefusedError, match="not UTF-8"):
        read_tasks(tmp_path / "b")
