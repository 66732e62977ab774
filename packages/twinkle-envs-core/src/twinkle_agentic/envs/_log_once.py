"""Log the traceback of an exception in the code of an env, once per source line."""

from __future__ import annotations

import logging
import traceback

from twinkle_agentic.envs.errors import TwinkleEnvError
from twinkle_agentic.tools._outcome import describe_error, what_was_raised

__all__ = ["log_raised"]

logger = logging.getLogger(__name__)

_MAX_PLACES = 100  # then no further one is logged
_logged: set[tuple[type, str, int]] = set()


def log_raised(error: BaseException, where: str) -> None:
    """Log the traceback of an exception that an env raised, once per source line.

    The error of a trajectory has no traceback, and hundreds of episodes may raise the same
    exception. Errors of `twinkle_agentic.envs.errors` are not logged.

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
    if place in _logged or len(_logged) >= _MAX_PLACES:
        return
    _logged.add(place)
    logger.warning(
        "%s raised %s; logged once per source line",
        where,
        describe_error(error),
        exc_info=(type(error), error, error.__traceback__),
    )
