"""Play one package, in process or by a client, and print what was seen as JSON on the last line.

Run by `table.py` in the environment of the package, and in one without the package.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, cast

from plays import LEGAL

_LISTED = re.compile(r"^legal_\w+: \[?([^,\]\n]+)", re.MULTILINE)
_TEXT_LIMIT = 20_000


def main() -> None:
    asked = json.loads(sys.argv[1])
    seen: dict[str, Any] = {"error": "", "class": ""}
    try:
        (_served if asked["url"] else _embedded)(asked, seen)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(seen))


def _embedded(asked: dict[str, Any], seen: dict[str, Any]) -> None:
    from twinkle_agentic.envs.openenv import OpenEnv
    from twinkle_agentic.envs.openenv._discovery import find_environment_classes

    name = asked["env_name"]
    for _ in range(2):  # the second look in one process must see the same
        seen["class"] = find_environment_classes(name).env_cls.__name__
    with OpenEnv(name, env_kwargs=asked["env_kwargs"], tools="auto") as env:
        env.reset_kwargs = asked["reset_kwargs"]
        _play(env, asked, seen)


def _served(asked: dict[str, Any], seen: dict[str, Any]) -> None:
    from twinkle_agentic.envs.openenv import OpenEnvClient

    with OpenEnvClient(
        asked["env_name"], base_url=asked["url"], reset_kwargs=asked["reset_kwargs"]
    ) as env:
        _play(env, asked, seen)


def _play(env: Any, asked: dict[str, Any], seen: dict[str, Any]) -> None:
    first = env.reset()
    seen["class"] = seen["class"] or str(first.info.get("client_class") or "").rpartition(":")[2]
    seen["note"] = first.info.get("client_note", "")
    seen["schema_error"] = first.info.get("schema_error", "")
    seen["tools"] = env.tools()
    seen["reset"] = _said(first)
    text, steps = first.observation, list[Any]()
    seen["steps"] = steps
    for move in asked["moves"]:
        if steps and steps[-1]["done"]:
            break
        step = env.step(*_call(move, env, text))
        text = step.observation
        steps.append(_said(step))
    if asked["illegal"] is not None:
        again = env.reset()
        seen["illegal"] = _said(env.step(*_call(asked["illegal"], env, again.observation)))
        after = env.step(*_call(asked["moves"][0], env, again.observation))
        seen["goes_on"] = after.error is None


def _call(move: Any, env: Any, text: str) -> tuple[str, dict[str, Any]]:
    if isinstance(move, list):
        tool, arguments = cast("tuple[str, dict[str, Any]]", move)
        return tool, arguments
    listed = _LISTED.search(text)
    first = listed[1] if listed is not None else LEGAL
    legal: Any = int(first) if first.isdigit() else first
    only = env.tools()[0]["function"]["name"]
    return only, {name: legal if value == LEGAL else value for name, value in move.items()}


def _said(result: Any) -> dict[str, Any]:
    return {
        "text": result.observation[:_TEXT_LIMIT],
        "reward": result.reward,
        "done": result.done,
        "error": result.error,
        "images": len(result.info.get("images", ())),
    }


main()
