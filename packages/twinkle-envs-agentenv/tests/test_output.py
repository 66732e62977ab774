import random
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv._output import CommandRun, HeadTail
from twinkle_agentic.tools.text import truncate_middle


@pytest.mark.parametrize("seed", range(30))
def test_clip_is_truncate_middle_in_pieces(seed: Any) -> None:
    chance = random.Random(seed)
    clip = HeadTail(max_chars := chance.randint(2, 40))
    text = ""
    for _ in range(chance.randint(0, 12)):
        piece = "".join(chance.choice("abc你\n") for _ in range(chance.randint(0, 30)))
        clip.add(piece)
        text += piece
    assert clip.text() == truncate_middle(text, max_chars) if text else clip.text() == ""
    assert clip.cut == max(0, len(text) - max_chars)


def test_clip_keeps_no_more_than_it_needs() -> None:
    clip: Any = HeadTail(1000)
    for _ in range(10_000):
        clip.add("x" * 997)
    head, tail = clip.ends()
    assert (len(head), len(tail)) == (500, 500)
    assert sum(len(piece) for piece in clip._tail) < 3_000
    assert clip.length == 9_970_000


def render(stdout: Any = "", stderr: Any = "", exit_code: Any = 0, timed_out: bool = False) -> Any:
    run = CommandRun(1.5, max_chars=200)
    run.stdout.add(stdout)
    run.stderr.add(stderr)
    run.exit_code, run.timed_out = exit_code, timed_out
    return run.output()


def test_stdout_alone_is_stripped_of_trailing_newlines() -> None:
    assert render("2\n\n") == "2"


def test_parts_are_marked() -> None:
    assert render("a\n", "b\n", 3) == "a\n[stderr]\nb\n[exit code 3]"
    assert render("", "b\n", 0) == "[stderr]\nb"
    assert render("", "\n", 1) == "[exit code 1]"
    assert render("a", exit_code=None, timed_out=True) == "a\n[killed: no end within 1.5 s]"


def test_no_output_is_empty() -> None:
    assert render() == ""


@pytest.mark.parametrize("seed", range(40))
def test_rendering_is_that_of_the_whole_text(seed: Any) -> None:
    chance = random.Random(seed)
    stdout = "".join(chance.choice("ab\n") for _ in range(chance.choice([0, 10, 190, 400, 5000])))
    stderr = "".join(chance.choice("cd\n") for _ in range(chance.choice([0, 10, 190, 400, 5000])))
    stdout, stderr = stdout.rstrip("\n"), stderr.rstrip("\n")
    parts = [part for part in (stdout, f"[stderr]\n{stderr}" if stderr else "") if part]
    assert render(stdout, stderr) == truncate_middle("\n".join(parts), 200)


def test_a_cut_stream_that_ends_in_newlines_still_says_what_is_missing() -> None:
    text = render("x" * 1000 + "\n" * 1000)
    assert "of 2000 characters cut" in text


def test_lone_surrogates_are_replaced() -> None:
    render("\ud800").encode()
