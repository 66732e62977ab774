# The data of the tests is free-form JSON, and pytest's syspath_prepend is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportTypedDictNotRequiredAccess=false, reportArgumentType=false
from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import pytest

from twinkle_agentic.envs.openenv._rendering import Guide, Renderer, mcp_error, start_error

SERVER_TRACEBACK = """Traceback (most recent call last):
  File "/app/coding_env/server/python_executor.py", line 80, in run
    result = self._executor(code)
  File "/venv/lib/smolagents/local_python_executor.py", line 1743, in __call__
    output, is_final_answer = evaluate_python_code(
                              ^^^^^^^^^^^^^^^^^^^^^
smolagents.local_python_executor.InterpreterError: ZeroDivisionError: division by zero
"""


def render_observation(observation: Any, *, first: bool = False) -> str:
    return Renderer().render(observation, guide=Guide() if first else None).text


def tool_result(**result: Any) -> dict[str, Any]:
    return {"tool_name": "t", "result": result or None, "error": None, "metadata": {}}


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (None, ""),
        ("as it is", "as it is"),
        ({}, ""),
        ({"stdout": "2\n", "stderr": "", "exit_code": 0, "metadata": {"last_code": "x"}}, "2"),
        (
            {"stdout": "a\n\n", "stderr": "bad\n", "exit_code": 1},
            "a\n[stderr]\nbad\n[exit code 1]",
        ),
        ({"stdout": "  indented\n"}, "  indented"),
        (
            {"stdout": "", "stderr": "", "exit_code": 0, "tests_passed": 3, "code_compiles": True},
            "tests_passed: 3\ncode_compiles: true",
        ),
        (
            {"result": {"stdout": "5\n", "stderr": "", "exception": None}, "iteration": 2},
            "5\niteration: 2",
        ),
        (
            {"result": {"stdout": "", "stderr": "", "exception": "NameError: x"}},
            "[stderr]\nNameError: x",
        ),
        (tool_result(content=[{"type": "text", "text": "raw"}], data="value"), "value"),
        (tool_result(content=[{"type": "text", "text": "a"}, {"type": "image"}]), "a\n[image]"),
        (tool_result(data={"k": [1, "é"]}), '{"k": [1, "é"]}'),
        (tool_result(content=[], structured_content={"a": 1}), '{"a": 1}'),
        (tool_result(), ""),
        (
            {"tool_name": "t", "result": None, "error": {"error_type": "x", "message": "no"}},
            "Error: no",
        ),
        ({"text": "a page", "tensor": [0.5] * 5000}, "a page"),
        (
            {"text": "a page", "goal": "Buy it.", "html": " a page\n", "last_action_error": True},
            "text: a page\ngoal: Buy it.\nlast_action_error: true",
        ),
        ({"question": "How many legs?", "score": None}, "How many legs?"),
        (
            {"x": 1, "y": 2, "message": "moved", "reward": 1.0, "done": False},
            "x: 1\ny: 2\nmessage: moved",
        ),
        (
            {"fen": "8/8 w", "legal_moves": ["e2e4", "g1f3"], "is_check": False},
            "fen: 8/8 w\nlegal_moves: e2e4, g1f3\nis_check: false",
        ),
        (
            {"board": [[0, 1], [-1, 0]], "legal_actions": [0, 1]},
            "board:\n 0  1\n-1  0\nlegal_actions: [0, 1]",
        ),
        (
            {"grid": [0, 1, 2, 3, 4, 5], "width": 3, "height": 2},
            "grid:\n0 1 2\n3 4 5\nwidth: 3\nheight: 2",
        ),
        ({"rows": ["ab", "cd\nef"]}, "rows:\nab\ncd\nef"),
    ],
)
def test_render(observation: Any, text: str) -> None:
    assert render_observation(observation) == text


def test_traceback_through_the_server_is_cut_to_what_the_program_did() -> None:
    text = render_observation({"stdout": "", "stderr": SERVER_TRACEBACK, "exit_code": 1})
    assert text == (
        "[stderr]\nsmolagents.local_python_executor.InterpreterError: "
        "ZeroDivisionError: division by zero\n[exit code 1]"
    )


def test_error_said_before_the_traceback_and_after_it_shows_once() -> None:
    said = "InterpreterError: division by zero"
    stderr = f"{said}\n{SERVER_TRACEBACK.rstrip()}\n{said}"
    text = render_observation({"result": {"stdout": "", "stderr": "", "exception": stderr}})
    assert text.count(said) == 1 and "python_executor.py" not in text


def test_error_said_twice_with_and_without_its_module_shows_once() -> None:
    said = "InterpreterError: Code parsing failed due to: SyntaxError\ndef f(:\n      ^"
    stderr = f"""{said}
Traceback (most recent call last):
  File "/venv/lib/smolagents/local_python_executor.py", line 1615, in evaluate_python_code
    expression = ast.parse(code)
  File "/usr/lib/python3.11/ast.py", line 50, in parse
    return compile(source, filename, mode, flags)
  File "<unknown>", line 1
    def f(:
          ^
SyntaxError: invalid syntax

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/repl_env/server/python_executor.py", line 261, in execute
    output = self._executor(code)
smolagents.local_python_executor.{said}
"""
    assert render_observation({"stdout": "", "stderr": stderr}) == f"[stderr]\n{said}"


def test_traceback_of_the_program_itself_is_kept() -> None:
    own = 'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\nKeyError: 1'
    assert own in render_observation({"stdout": "", "stderr": own, "exit_code": 1})
    mixed = SERVER_TRACEBACK + own
    assert "python_executor.py" in render_observation({"stdout": "", "stderr": mixed})


@pytest.mark.parametrize(
    ("array", "size"),
    [
        ([0.5] * 100_800, "100800"),
        ([[[0.1, 0.2]] * 20] * 20, "20 x 20 x 2"),
        ([[0] * 100] * 100, "100 x 100"),
    ],
)
def test_long_arrays_are_summarised(array: list[Any], size: str) -> None:
    text = render_observation({"screen": array, "lives": 3})
    assert f"screen: [{size} numbers not shown]" in text
    assert "lives: 3" in text
    assert len(text) < 200
    assert "numbers not shown" in render_observation({"state": {"screen": array}, "lives": 3})


def test_metadata_for_the_model_follows_the_fields() -> None:
    maze = [[0, 1], [0, 0]]
    metadata = {"maze": maze, "status": "playing", "exit_cell": [1, 1], "next_player": -1}
    shown = render_observation({"position": [0, 0], "metadata": metadata})
    assert shown == (
        "position: [0, 0]\nmaze:\n0 1\n0 0\nstatus: playing\nexit_cell: [1, 1]\nnext_player: -1"
    )


@pytest.mark.parametrize(
    "metadata",
    [
        {"evaluation": 3.5},
        {"discounted_rewards": [1.0], "gamma": 0.9},
        {"ground_truth": "7", "expected_answer": "7", "correct": True},
        {"verify_commands": ["test -f answer"]},
        {"api_key": "k", "temp_api_key": "k", "auth_token": "t", "secret_word": "w"},
        {"reward_signals": 1, "total_reward": 2},
        {"total_execution_time": 0.5},
        {"last_code": "print(1)", "execution_time": 0.1, "traceback": "File...", "episode_id": "e"},
        {"status": "ready", "note": "", "history": [], "raw_messages": ["x"], "fen": "y"},
        {"deep": {"a": 1}, "objects": [{"a": 1}], "long": "x" * 2_001, "many": list(range(65))},
        {"copy": "x", "answer": 42, "target_answer": "z"},
    ],
)
def test_what_is_not_for_the_model_is_hidden(metadata: dict[str, Any]) -> None:
    assert render_observation({"fen": "x", "turn": "w", "metadata": metadata}) == "fen: x\nturn: w"


def test_long_text_that_another_field_has_is_left_out() -> None:
    code = "def f(x):\n    return x\n" * 10
    fields = {"task": f"Make this faster:\n{code}", "code": code, "turn": 1}
    assert render_observation(fields) == f"task:\nMake this faster:\n{code}\nturn: 1"


def test_reward_and_secrets_among_the_fields_are_hidden() -> None:
    fields = {
        "speed": 1,
        "rubric_reward": 2.0,
        "reward_hint": 0.5,
        "temp_api_key": "k",
        "tokens": 3,
    }
    assert render_observation(fields) == "speed: 1\ntokens: 3"


def test_metadata_is_limited_in_number() -> None:
    shown = render_observation({"x": 1, "metadata": {f"m{i}": i for i in range(30)}})
    assert shown.count("\n") == 24 and "m23: 23" in shown


def test_metadata_shows_again_where_it_changed() -> None:
    renderer = Renderer()
    metadata = {"maze": [[0, 1], [0, 0]], "turn": "x"}
    assert "maze" in renderer.render({"at": 1, "metadata": metadata}, guide=Guide()).text
    assert renderer.render({"at": 2, "metadata": metadata}).text == "at: 2"
    changed = {**metadata, "turn": "o"}
    assert renderer.render({"at": 3, "metadata": changed}).text == "at: 3\nturn: o"
    assert "maze" in renderer.render({"at": 1, "metadata": metadata}, guide=Guide()).text


def test_fields_can_be_chosen_and_hidden() -> None:
    fields = {"fen": "x", "moves": ["e4"], "metadata": {"evaluation": 3.5, "clock": 1}}
    chosen = Renderer(only=["evaluation", "fen", "reward"])
    assert chosen.render(fields, guide=Guide(about="chess")).text == "evaluation: 3.5\nfen: x"
    assert Renderer(only=["fen"]).render(fields).text == "x"
    assert Renderer(hide=["moves", "clock"]).render(fields).text == "x"


def test_first_observation_says_what_there_is_and_how_to_act() -> None:
    guide = Guide(about="Environment: maze", meanings={"at": "You.", "gone": "No."}, acting="Go.")
    first = Renderer().render({"at": [0, 1], "gone": None}, guide=guide)
    assert first.text == "Environment: maze\nat: [0, 1]\nWhat the fields mean:\n- at: You.\nGo."
    assert Renderer().render({"stdout": ""}, guide=guide).text == "Environment: maze\nGo."
    assert Renderer().render({"question": "Why?"}, guide=guide).text == "Why?"
    assert Renderer().render(tool_result(data="hello"), guide=guide).text == "hello"


@pytest.mark.parametrize(
    ("fields", "arguments", "note"),
    [
        ({"legal_actions": [0, 1]}, {"column": 9}, "[column=9 was not among legal_actions]"),
        ({"legal_actions": [0, 1]}, {"column": 1}, ""),
        ({"legal_actions": [0, 1]}, {"column": "1"}, ""),  # it is converted
        ({"legal_actions": [0, 1]}, {"column": True}, ""),
        ({"legal_moves": ["e2e4"]}, {"move": "e2e5"}, "[move='e2e5' was not among legal_moves]"),
        ({"metadata": {"valid_actions": [2]}}, {"a": 3}, "[a=3 was not among valid_actions]"),
        ({"legal_actions": [0]}, {"x": 1, "y": 2}, ""),  # which one is meant is not known
        ({"legal_players": [0]}, {"message": "x"}, ""),
        ({"legal_actions": [[0, 1]]}, {"column": 9}, ""),
        ({"legal_actions": []}, {"column": 9}, ""),
    ],
)
def test_move_that_was_not_offered_is_named(
    fields: dict[str, Any], arguments: dict[str, Any], note: str
) -> None:
    renderer = Renderer()
    assert renderer.not_offered(arguments) == ""
    renderer.render(fields, guide=Guide())
    assert renderer.not_offered(arguments) == note


def test_move_is_held_against_the_latest_observation_that_the_model_saw() -> None:
    renderer = Renderer(hide=["legal_actions"])
    renderer.render({"legal_actions": [0]}, guide=Guide())
    assert renderer.not_offered({"column": 9}) == ""
    renderer = Renderer()
    renderer.render({"legal_actions": [0]}, guide=Guide())
    renderer.render({"legal_actions": [9]})
    assert renderer.not_offered({"column": 9}) == ""
    renderer.render({"board": 1})
    assert renderer.not_offered({"column": 0}) == ""


def test_images_are_taken_out_of_the_text() -> None:
    screen = [i % 256 for i in range(40 * 30)]
    rendered = Renderer().render({"screen": screen, "screen_shape": [40, 30], "lives": 3})
    assert rendered.text == "screen: [image 1: 30 x 40 pixels]\nlives: 3"
    assert [image[:4] for image in rendered.images] == [b"\x89PNG"]
    data = base64.b64encode(rendered.images[0]).decode()
    block = {"type": "image", "data": data, "mimeType": "image/png"}
    seen = Renderer().render(tool_result(content=[{"type": "text", "text": "a"}, block]))
    assert (seen.text, seen.images) == ("a\n[image 1: 0 kB]", rendered.images)


def test_chat_shows_the_prompt_first_and_only_new_messages_later() -> None:
    message = {"sender_id": -1, "content": "Guess a word.", "category": "PROMPT"}
    fields = {"prompt": "You play Wordle.", "messages": [message], "legal_players": [0]}
    renderer = Renderer()
    first = renderer.render(fields, guide=Guide(about="Environment: words"))
    assert first.text == "You play Wordle.\nGuess a word.\nlegal_players: [0]"
    later = {**fields, "prompt": "Wordle-v0", "legal_players": [0]}
    assert renderer.render(later).text == "Guess a word."


def test_prompt_that_is_among_the_messages_shows_once() -> None:
    message = {"sender_id": -1, "content": "\n[GAME] Guess a number.\nIt is below 20."}
    fields = {"prompt": "[GAME] Guess a number.\nIt is below 20.", "messages": [message]}
    assert render_observation(fields, first=True) == message["content"]


def test_task_in_the_metadata_of_an_observation_without_fields_shows() -> None:
    metadata = {
        "question": "What was the revenue?",
        "company": "acme",
        "status": "ready",
        "verify_commands": ["test -f answer"],
        "ground_truth": "7",
        "message": "",
        "history": [],
    }
    observation = {"reward": 0.0, "done": False, "metadata": metadata}
    shown = "question: What was the revenue?\ncompany: acme"
    assert render_observation(observation, first=True) == shown
    assert render_observation(observation) == shown
    ready = {"metadata": {"message": "Ready.", "status": "ready"}}
    assert render_observation(ready, first=True) == "Ready."
    assert render_observation({"x": None, "metadata": metadata}, first=True) == shown


def test_first_observation_of_an_interpreter_tells_what_there_is() -> None:
    fields = {
        "result": {"stdout": "", "stderr": "", "exception": None},
        "context_preview": "The text...",
        "iteration": 0,
    }
    renderer = Renderer()
    first = renderer.render(fields, guide=Guide()).text
    assert first == "context_preview: The text...\niteration: 0"
    assert renderer.render({**fields, "iteration": 1}).text == "iteration: 1"


def test_objects_with_fields_are_rendered_as_mappings() -> None:
    @dataclass
    class Seen:
        text: str = "hello"

    assert render_observation(Seen()) == "hello"


def test_lone_surrogates_and_infinities_are_made_readable() -> None:
    assert render_observation({"a": "\ud800", "b": float("inf")}) == "a: �\nb: Infinity"


@pytest.mark.parametrize(
    ("observation", "done", "metadata", "said"),
    [
        ({"text": "x"}, False, {}, None),
        ({}, True, {"status": "error", "error": "no key"}, "no key"),
        ({}, True, {"status": "error", "message": "no key"}, "no key"),
        ({}, True, {"status": "ready"}, None),
        ({"error": "'scenario' is required"}, False, {}, "'scenario' is required"),
        ({"error": None}, False, {}, None),
    ],
)
def test_start_error(observation: Any, done: bool, metadata: Any, said: str | None) -> None:
    assert start_error(observation, done=done, metadata=metadata) == said


@pytest.mark.parametrize(
    ("observation", "error"),
    [
        (None, None),
        ({"text": "x"}, None),
        (tool_result(data=1), None),
        ({"tool_name": "t", "result": None, "error": "plain"}, "plain"),
        ({"tool_name": "t", "result": None, "error": {"error_type": "timeout"}}, "timeout"),
        (tool_result(is_error=True, content=[{"type": "text", "text": "bad"}]), "bad"),
        (tool_result(is_error=True), "the tool failed"),
        (
            {
                "tool_name": "t",
                "result": None,
                "error": {"message": "bad\n  For further information visit https://e.dev/x"},
            },
            "bad",
        ),
    ],
)
def test_mcp_error(observation: Any, error: str | None) -> None:
    assert mcp_error(observation) == error
