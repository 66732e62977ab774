from __future__ import annotations

from typing import Any

import pytest

from twinkle_agentic.envs import text
from twinkle_agentic.envs.text import render_command_output, render_fields


def test_public_names() -> None:
    assert [name for name in text.__all__ if not hasattr(text, name)] == []


@pytest.mark.parametrize(
    ("stdout", "stderr", "exit_code", "expected"),
    [
        ("2\n", "", 0, "2"),
        ("a\n\n\n", "", None, "a"),
        ("", "", 0, ""),
        ("a\n", "warning\n", 0, "a\n[stderr]\nwarning"),
        ("", "", 3, "[exit code 3]"),
        ("out\n", "err\n", 1, "out\n[stderr]\nerr\n[exit code 1]"),
        ("\ud800\n", "", 0, "�"),
    ],
)
def test_command_output(stdout: str, stderr: str, exit_code: int | None, expected: str) -> None:
    assert render_command_output(stdout, stderr, exit_code) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"question": "Why?"}, "Why?"),
        ({"a": None, "b": "", "c": [], "d": {}}, ""),
        ({"a": 1, "b": "x", "c": False}, "a: 1\nb: x\nc: false"),
        ({"note": "two\nlines", "n": 1}, "note:\ntwo\nlines\nn: 1"),
        ({"moves": ["e4", "d4"], "n": 1}, "moves: e4, d4\nn: 1"),
        ({"legal": [1, 2, 3]}, "legal: [1, 2, 3]"),
        ({"board": [[0, 10], [-1, 0]]}, "board:\n 0 10\n-1  0"),
        ({"board": [["X", "."], [".", "O"]]}, "board:\nX .\n. O"),
        ({"grid": [1, 2, 3, 4], "width": 2, "height": 2}, "grid:\n1 2\n3 4\nwidth: 2\nheight: 2"),
        ({"rows": [[1, 2], [3]]}, "rows: [[1, 2], [3]]"),
        ({"nested": {"a": [1]}}, 'nested: {"a": [1]}'),
        ({"x": float("nan")}, "NaN"),
    ],
)
def test_fields(fields: dict[str, Any], expected: str) -> None:
    assert render_fields(fields) == expected


PNG = "iVBORw0KGgo" + "A" * 5_000
JPEG = "data:image/jpeg;base64,/9j/" + "Zm9v\n" * 1_000


@pytest.mark.parametrize(
    "fields",
    [
        {"pixels": PNG, "speed": 3},
        {"pixels": JPEG, "speed": 3},
        {"views": [PNG, PNG], "speed": 3},
        {"view": {"left": PNG, "all": [JPEG]}, "speed": 3},
        {"cameras": [{"name": "left", "pixels": PNG}], "speed": 3},
    ],
)
def test_images_are_summarised(fields: dict[str, Any]) -> None:
    shown = render_fields(fields)
    assert "[image of 3 kB not shown]" in shown
    assert "speed: 3" in shown and len(shown) < 200


def test_only_field_may_be_an_image() -> None:
    assert render_fields({"screenshot": PNG}) == "[image of 3 kB not shown]"
    assert render_fields({"note": "iVBORw0KGgo is how a PNG starts" * 20}).startswith("iVBOR")


def test_arrays_inside_a_list_of_objects_are_summarised() -> None:
    shown = render_fields({"agents": [{"id": 1, "screen": [0] * 100}, {"id": 2}]})
    assert shown == 'agents: [{"id": 1, "screen": "[100 numbers not shown]"}, {"id": 2}]'


def test_fields_to_skip_and_to_name() -> None:
    assert render_fields({"a": "x", "secret": 1}, skip={"secret"}) == "x"
    assert render_fields({"a": "x"}, name_all=True) == "a: x"


@pytest.mark.parametrize("values", [[0] * 65, [[[1, 2]] * 9] * 9, [[0] * 65] * 65])
def test_long_arrays_of_numbers_are_summarised(values: list[Any]) -> None:
    shown = render_fields({"data": values, "inside": {"data": [0] * 100}})
    assert shown.count("numbers not shown]") == 2
    assert len(shown) < 200
