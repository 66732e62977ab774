"""The packaged tasks and their script fit together."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from typing import Any

from twinkle_agentic.rollout.cli.scripted_endpoint import ScriptedPolicy
from twinkle_agentic.rollout.cli.tasks import read_tasks


def attempts(prompt: str) -> list[str | None]:
    """Play a conversation in which every attempt fails, up to four turns."""
    policy = ScriptedPolicy.from_file()
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    codes: list[str | None] = []
    for _ in range(4):
        message = policy.reply(messages)
        assert message is not None
        calls = message.get("tool_calls")
        if not calls:
            codes.append(None)
            break
        codes.append(json.loads(calls[0]["function"]["arguments"])["code"])
        messages += [message, {"role": "tool", "content": "A test fails"}]
    return codes


def passes(code: str, tests: str) -> bool:
    names: dict[str, Any] = {}
    try:
        exec(code, names)
        exec(tests, names)
    except Exception:
        return False
    return True


def test_tasks_are_solved_at_once_after_a_failure_or_never() -> None:
    with as_file(files("twinkle_agentic.rollout.cli") / "data/tasks.jsonl") as path:
        tasks = read_tasks(path, needs=("tests",))
    outcomes: dict[str, int] = {}
    for task in tasks:
        data: Any = task.get("user_data")
        prompt: Any = task.get("messages", [])[0].get("content")
        results = [code is not None and passes(code, data["tests"]) for code in attempts(prompt)]
        kind = "never" if True not in results else ("at once" if results[0] else "later")
        outcomes[kind] = outcomes.get(kind, 0) + 1
    assert outcomes == {"at once": 19, "later": 8, "never": 5}


def test_a_script_of_messages_is_said_one_after_the_other() -> None:
    policy = ScriptedPolicy({"my number": [{"content": "7"}, {"content": "8"}]})
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Guess my number."}]
    first: Any = policy.reply(messages)
    assert first == {"role": "assistant", "content": "7"}
    messages += [first, {"role": "user", "content": "no"}]
    second: Any = policy.reply(messages)
    assert second == {"role": "assistant", "content": "8"}
    assert policy.reply([*messages, second]) is None
    assert policy.reply([{"role": "user", "content": "What is love?"}]) is None


def test_without_a_tool_to_submit_with_the_first_attempt_is_run() -> None:
    policy = ScriptedPolicy.from_file()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Write a function `add(a, b)`."}]
    message = policy.reply(messages, tool="run_python")
    assert message is not None
    assert message["tool_calls"][0]["function"]["name"] == "run_python"
    messages += [message, {"role": "tool", "content": ""}]
    last = policy.reply(messages, tool="run_python")
    assert last is not None
    assert "tool_calls" not in last
