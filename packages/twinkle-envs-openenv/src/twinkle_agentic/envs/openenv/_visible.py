"""Which fields and metadata of an observation a model sees, and which fields of an action.

What the environment says to the agent is shown. Hidden are: the reward in any of its names, secrets
and, in the metadata, what belongs to the grader or to the records of the run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

from twinkle_agentic.envs.text import is_grid
from twinkle_agentic.tools.text import to_jsonable

__all__ = ["is_offered", "is_shown", "shown_metadata"]

_OF_THE_FRAMEWORK = frozenset({"metadata", "reward", "done"})
_REWARD = re.compile(r"(^|_)rewards?(_|$)")
_SECRET = re.compile(
    r"(^|_)(api_?keys?|(access|private|secret)_key|secrets?|passwords?|passwd|credentials?"
    r"|(access|auth|api|bearer|session)_token)(_|$)"
)
# Fields of an action that choose what is played; a running episode is not changed by them.
_SETTINGS = frozenset({"game_name", "game_params", "obs_type", "full_action_space"})

_OF_THE_GRADER = re.compile(
    r"(^|_)(eval|evaluation|truth|gold|expected|solution|oracle|verify|verifier|verification"
    r"|grader|grading|rubric|discounted|gamma|advantage|correct)(_|$)"
    r"|^((reference|target|true)_)?answer(_key)?$"
)
_OF_THE_RECORDS = re.compile(
    r"^((episode|session|request|run|sandbox)_id|timestamp|created_at|traceback|raw_.*"
    r"|(total_)?(execution|elapsed|wall)_time.*|duration.*|elapsed.*|latency.*)$"
)
_SAYS_NOTHING = frozenset({"ready", "ok", "success"})  # as a status
_MAX_ENTRIES = 24
_MAX_CHARS = 2_000
_MAX_ITEMS = 64


def is_shown(name: str, hide: Collection[str] = ()) -> bool:
    """Whether a field of an observation is for the model."""
    return (
        name not in _OF_THE_FRAMEWORK
        and name not in hide
        and not _REWARD.search(name)
        and not _SECRET.search(name)
    )


def is_offered(name: str, *, required: bool, hide: Collection[str] = ()) -> bool:
    """Whether a field of an action is for the model; one that it must give always is."""
    if name == "metadata":
        return False
    return required or not (name in hide or name in _SETTINGS or _SECRET.search(name))


def shown_metadata(
    metadata: Mapping[str, Any], *, beside: Mapping[str, Any], hide: Collection[str] = ()
) -> dict[str, Any]:
    """Return what of the metadata is for the model.

    Args:
        metadata: Of an observation.
        beside: The fields of that observation that are shown; what repeats one is left out.
        hide: Names to leave out.

    Returns:
        Numbers, truth values, texts up to 2,000 characters, lists of up to 64 of these, and boards;
        24 entries at most, in order.
    """
    texts = {value.strip() for value in beside.values() if isinstance(value, str)}
    shown: dict[str, Any] = {}
    for name, raw in metadata.items():
        if len(shown) == _MAX_ENTRIES:
            break
        if name in beside or not is_shown(name, hide) or _is_kept_back(name, raw):
            continue
        value = to_jsonable(raw)
        if (_is_short(value) or is_grid(value)) and value not in (None, "", []):
            if isinstance(value, str) and value.strip() in texts:
                continue
            shown[name] = value
    return shown


def _is_kept_back(name: str, value: Any) -> bool:
    if _OF_THE_GRADER.search(name) or _OF_THE_RECORDS.search(name):
        return True
    if not isinstance(value, str):
        return False
    # Code in the metadata is that of the action. A status that is all right says nothing.
    return name.endswith("_code") or (name == "status" and value in _SAYS_NOTHING)


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _MAX_CHARS
    if isinstance(value, list):
        items = cast("list[Any]", value)
        scalars = all(isinstance(item, (str, int, float)) for item in items)
        return (
            scalars and len(items) <= _MAX_ITEMS and sum(len(str(i)) for i in items) <= _MAX_CHARS
        )
    return isinstance(value, (int, float))
