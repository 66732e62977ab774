"""One rule for every limit."""

from __future__ import annotations

import queue
import threading
from fractions import Fraction
from typing import Any

import pytest

from twinkle_agentic._aio.limits import MAX_LIMIT_S, check_count, check_limit

BAD: list[Any] = [float("nan"), float("inf"), float("-inf"), -1, True, "5", [1], 1e10, 10**400]


@pytest.mark.parametrize("value", [*BAD, 0, None])
def test_what_bounds_no_wait_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"step_timeout_s must be above 0.*, found "):
        check_limit("step_timeout_s", value)


@pytest.mark.parametrize("value", BAD)
def test_zero_and_none_are_allowed_on_request_and_nothing_else(value: Any) -> None:
    check_limit("wait_s", 0, allow_zero=True)
    check_limit("wait_s", None, allow_none=True)
    with pytest.raises(ValueError, match=r"wait_s must be at least 0.* or None, found "):
        check_limit("wait_s", value, allow_zero=True, allow_none=True)


@pytest.mark.parametrize("value", [1, 0.001, MAX_LIMIT_S, Fraction(1, 3)])
def test_numbers_of_any_type_are_limits(value: Any) -> None:
    check_limit("step_timeout_s", value)


def test_the_longest_limit_is_one_that_can_be_waited() -> None:
    mail: queue.SimpleQueue[int] = queue.SimpleQueue()
    mail.put(1)
    assert mail.get(timeout=MAX_LIMIT_S + 1_000.0) == 1
    assert threading.Lock().acquire(timeout=MAX_LIMIT_S + 1_000.0)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3", float("nan")])
def test_what_counts_nothing_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_turns must be a whole number of at least 1, found"):
        check_count("max_turns", value)


def test_counts_may_start_elsewhere_or_be_missing() -> None:
    check_count("max_turns", 1)
    check_count("num_workers", 0, at_least=0)
    check_count("max_tokens", None, allow_none=True)
    with pytest.raises(ValueError, match="at least 2 or None, found 1"):
        check_count("size", 1, at_least=2, allow_none=True)
