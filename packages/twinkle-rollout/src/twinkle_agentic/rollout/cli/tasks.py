"""Tasks from a JSON Lines file: one object a line, checked before anything starts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from twinkle_agentic.envs.verdict import TaskFaultError, compile_tests
from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.tools.text import clean_text
from twinkle_agentic.tools.types import Trajectory

__all__ = ["COLUMNS", "read_tasks", "repeat_tasks", "sample_mark"]

_ROLES = ("system", "developer", "user", "assistant", "tool")

COLUMNS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "id": ((str, int), "names the task in outputs; by default its line number"),
    "prompt": (str, "the user message (or give `messages`)"),
    "messages": (list, "the whole conversation so far, chat-completions form"),
    "system": (str, "a system message before the prompt"),
    "tests": (str, "unit tests, Python code run after the solution (coding_env)"),
    "seed": (int, "passed to the environment's reset"),
    "user_data": (dict, "further data: passed to the environment's reset and kept in the output"),
}
"""Column -> (its JSON type, what it means)."""


def read_tasks(
    path: Path, *, needs: Sequence[str] = (), ignores: Sequence[str] = ()
) -> list[Trajectory]:
    """Read and check a task file.

    Args:
        path: UTF-8 JSON Lines; blank lines are passed over.
        needs: Columns that each line must have, besides `prompt` or `messages`.
        ignores: Columns that no line may have, for nothing would read them.

    Returns:
        One trajectory a task: `messages`, `id`, and `user_data` with `tests` and `seed` where
            given.

    Raises:
        RefusedError: The file cannot be read or a line does not fit; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RefusedError(f"cannot read the tasks in {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RefusedError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    tasks: list[Trajectory] = []
    seen: dict[str, int] = {}
    for number, row in _rows(path, text):
        where = f"{path}, line {number}"
        _check_columns(where, row, needs)
        for name in ignores:
            if name in row:
                raise RefusedError(
                    f"{where}: this environment does not read the column {name!r}: is --env right?"
                )
        _check_tests(where, row.get("tests"))
        task_id = clean_text(str(row.get("id", number)))  # as the output will have it
        if task_id in seen:
            raise RefusedError(f"{where}: id {task_id!r} stands on line {seen[task_id]} already")
        seen[task_id] = number
        tasks.append(_trajectory(where, row, task_id))
    if not tasks:
        raise RefusedError(f"{path} holds no task: each line is an object with a `prompt`")
    return tasks


def repeat_tasks(tasks: Sequence[Trajectory], samples: int) -> list[Trajectory]:
    """Take each task several times, for methods that compare the samples of one task.

    Args:
        tasks: Each with an `id`.
        samples: How often.

    Returns:
        The samples of a task one after the other, each with the `id` of the task as `task`, its
        number from 0 as `sample`, and an `id` made of both; where `samples` is 1, the tasks as they
        are.
    """
    if samples == 1:
        return list(tasks)
    repeated: list[Trajectory] = []
    for task in tasks:
        name = str(dict(task)["id"])
        for number in range(samples):
            mark = sample_mark(name, number)
            repeated.append(cast("Trajectory", {**copy.deepcopy(task), **mark}))
    return repeated


def sample_mark(task: str, number: int) -> dict[str, Any]:
    """Return what tells a sample of a task from the others."""
    return {"id": f"{task}#{number}", "task": task, "sample": number}


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row: object = json.loads(line, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"{path}, line {number}: no valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise RefusedError(
                f"{path}, line {number}: expected an object, found {type(row).__name__}"
            )
        yield number, cast("dict[str, Any]", row)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse what `json` takes in silence: of two values of one name it forgets the first."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} stands twice in one object")
    return row


def _check_columns(where: str, row: dict[str, Any], needs: Sequence[str]) -> None:
    for name, value in row.items():
        if name not in COLUMNS:
            close = get_close_matches(name, COLUMNS, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise RefusedError(
                f"{where}: unknown column {name!r}{hint} (known: {', '.join(COLUMNS)}; what is "
                "yours goes into `user_data`)"
            )
        kinds = COLUMNS[name][0]
        if not isinstance(value, kinds) or isinstance(value, bool):
            wanted = kinds if isinstance(kinds, tuple) else (kinds,)
            names = " or ".join(kind.__name__ for kind in wanted)
            raise RefusedError(f"{where}: column {name!r} must be {names}, found {value!r:.80}")
    if ("prompt" in row) == ("messages" in row):
        raise RefusedError(
            f"{where}: give either `prompt` or `messages`, found columns {list(row)}"
        )
    for name in needs:
        if name not in row:
            raise RefusedError(f"{where}: this environment needs the column {name!r}")


def _check_tests(where: str, tests: str | None) -> None:
    if tests is None:
        return
    try:
        compile_tests(tests)
    except TaskFaultError as error:
        raise RefusedError(f"{where}: column 'tests': {error}") from error


def _trajectory(where: str, row: dict[str, Any], task_id: str) -> Trajectory:
    asked = [{"role": "user", "content": row.get("prompt")}]
    messages: list[Any] = list(row.get("messages", asked))
    if not messages:
        raise RefusedError(f"{where}: `messages` is empty: there is nothing to ask the model")
    for message in messages:
        if isinstance(message, dict) and "role" in message and message["role"] not in _ROLES:
            raise RefusedError(
                f"{where}: role {message['role']!r:.40} is none of {', '.join(_ROLES)}"
            )
        if not isinstance(message, dict) or "role" not in message:
            raise RefusedError(
                f"{where}: each message is an object with a `role`, found {message!r:.80}"
            )
    if "system" in row:
        messages.insert(0, {"role": "system", "content": row["system"]})
    user_data = dict(row.get("user_data") or {})
    for name in ("tests", "seed"):
        if name in row and user_data.get(name, row[name]) != row[name]:
            raise RefusedError(
                f"{where}: {name!r} is {row[name]!r:.40} and in `user_data` "
                f"{user_data[name]!r:.40}: give one of them"
            )
    user_data.update({name: row[name] for name in ("tests", "seed") if name in row})
    return cast("Trajectory", {"id": task_id, "messages": messages, "user_data": user_data})
