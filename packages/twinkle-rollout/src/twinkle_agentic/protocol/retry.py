"""Which failed requests are sent again, and when."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from twinkle_agentic._aio.limits import check_count, check_limit
from twinkle_agentic.protocol.errors import ApiError

__all__ = ["RetryPolicy", "parse_retry_after"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds on trying again: one request of a client, or one trajectory of a rollout.

    Only what may pass is repeated: HTTP 429 and 5xx (408, 409), connections that failed or broke,
    attempts that timed out. The time limit of the request covers all attempts and the pauses
    between them.

    Attributes:
        max_attempts: How often a request is sent at most (>= 1).
        base_delay_s: Pause before the second attempt, doubled for each further one, each shortened
            by a random part of up to a half.
        max_delay_s: Longest pause of ours. A server that asks for more by `Retry-After` gets it,
            within the time limit.
        attempt_timeout_s: Limit of one attempt; `None` lets one attempt use up the request's whole
            limit.
    """

    max_attempts: int = 4
    base_delay_s: float = 0.5
    max_delay_s: float = 16.0
    attempt_timeout_s: float | None = None

    def __post_init__(self) -> None:
        check_count("max_attempts", self.max_attempts)
        check_limit("base_delay_s", self.base_delay_s, allow_zero=True)
        check_limit("max_delay_s", self.max_delay_s, allow_zero=True)
        check_limit("attempt_timeout_s", self.attempt_timeout_s, allow_none=True)

    def pause_s(self, attempt: int) -> float:
        """Return the pause after attempt number `attempt` (from 1), shortened at random."""
        pause_s = min(self.base_delay_s * 2 ** (attempt - 1), self.max_delay_s)
        return pause_s * (1 - random.random() / 2)

    def delay_s(self, error: ApiError, attempt: int) -> float | None:
        """Say how long to wait before the next attempt.

        Args:
            error: How attempt number `attempt` (from 1) failed.
            attempt: Number of attempts so far.

        Returns:
            Seconds, or `None` where the request must not be sent again.
        """
        if not error.retryable or attempt >= self.max_attempts:
            return None
        delay = self.pause_s(attempt)
        return delay if error.retry_after_s is None else max(delay, error.retry_after_s)


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Read how many seconds a server asks to wait.

    Args:
        headers: Response headers, asked for by names in lower case: `retry-after-ms`, or
            `retry-after` in seconds or as a date.

    Returns:
        Seconds >= 0; `None` where the header is absent or unreadable.
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) / unit
        except (KeyError, ValueError):
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        when = parsedate_to_datetime(headers.get("retry-after", ""))
    except (TypeError, ValueError, IndexError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
