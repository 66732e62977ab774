"""Where an env raised, for its author: the error of a trajectory tells what, and no line."""

from __future__ import annotations

import logging
import traceback

from twinkle_agentic.envs.errors import TwinkleEnvError
from twinkle_agentic.tools.outcome import describe_error, what_was_raised

__all__ = ["log_raised"]

logger = logging.getLogger(__name__)

_MAX_PLACES = 100  # what raises in more places than that has been said often enough
_said: set[tuple[type, str, int]] = set()


def log_raised(error: BaseException, where: str) -> None:
    """Log the traceback of an exception that no env is meant to raise, once for each place.

    Hundreds of episodes meet the same fault; one traceback is what its author needs. An error of
    `twinkle_agentic.envs.errors` is no fault of the code, and is not logged.

    Args:
        error: What was raised.
        where: What was asked of the env, for the message.
    """
    error = what_was_raised(error)
    if isinstance(error, TwinkleEnvError):
        return
    file, line = "", 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, line = frame.f_code.co_filename, number
    place = (type(error), file, line)
    if place in _said or len(_said) >= _MAX_PLACES:
        return
    _said.add(place)
    logger.warning(
        "%s raised %s; this is said once for each place",
        where,
        describe_error(error),
        exc_info=(type(error), error, error.__traceback__),
    )
