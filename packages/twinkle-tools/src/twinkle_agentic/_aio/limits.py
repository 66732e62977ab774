"""What passes for a limit: one rule for every argument that bounds a wait or counts something."""

from __future__ import annotations

import numbers
from typing import Any, Final

__all__ = ["MAX_LIMIT_S", "check_count", "check_limit"]

MAX_LIMIT_S: Final = 1_000_000_000
"""Longest limit taken, 31 years: with a grace added it still fits every lock, queue and loop."""


def check_limit(
    name: str, value: object, *, allow_none: bool = False, allow_zero: bool = False
) -> None:
    """Refuse a number of seconds that would not bound a wait.

    Args:
        name: The argument, for the message.
        value: What was given for it.
        allow_none: `None` is fine: there is no limit, or it comes from elsewhere.
        allow_zero: 0 is fine: not to wait at all.

    Raises:
        ValueError: It is no number, NaN, infinite, longer than `MAX_LIMIT_S`, or below what is
            allowed. Booleans and numbers in text are no numbers.
    """
    if value is None and allow_none:
        return
    hint = ""
    number = _plain(value)
    if isinstance(number, numbers.Real):
        seconds: Any = number
        if 0 < seconds <= MAX_LIMIT_S or (allow_zero and seconds == 0):
            return
        if seconds > MAX_LIMIT_S:
            hint = f": the longest limit is {MAX_LIMIT_S:,} s"
    least = "at least 0" if allow_zero else "above 0"
    none = " or None" if allow_none else ""
    raise ValueError(f"{name} must be {least}{none}, found {value!r}{hint}")


def check_count(name: str, value: object, *, at_least: int = 1, allow_none: bool = False) -> None:
    """Refuse what is no whole number of things, such as turns, threads or bytes.

    Args:
        name: The argument, for the message.
        value: What was given for it.
        at_least: The smallest number that makes sense.
        allow_none: `None` is fine.

    Raises:
        ValueError: It is no whole number, or too small. Booleans are no numbers.
    """
    if value is None and allow_none:
        return
    number = _plain(value)
    if isinstance(number, numbers.Integral):
        count: Any = number
        if count >= at_least:
            return
    none = " or None" if allow_none else ""
    raise ValueError(f"{name} must be a whole number of at least {at_least}{none}, found {value!r}")


def _plain(value: object) -> object:
    return None if isinstance(value, bool) else value
