"""Limits that would bound nothing, or count nothing, are refused where they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from twinkle_agentic.protocol import OpenAI, RetryPolicy
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.tools import ToolManager

SECONDS = (
    "deadline_s",
    "request_timeout_s",
    "tool_timeout_s",
    "reset_timeout_s",
    "evaluate_timeout_s",
    "close_timeout_s",
)
COUNTS = ("max_turns", "concurrency", "max_trajectory_tokens", "max_threads")
URL = "http://127.0.0.1:1/v1"


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "10"])
def test_seconds_that_bound_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0"):
        APIMultiTurnRollout(OpenAI("m", base_url=URL), ToolManager(), **{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, math.inf, True, "10"])
def test_counts_that_are_no_counts_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        APIMultiTurnRollout(OpenAI("m", base_url=URL), ToolManager(), **{name: value})


@pytest.mark.parametrize("value", [0, math.inf, math.nan, True, "10"])
def test_client_refuses_a_time_that_bounds_nothing(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be above 0"):
        OpenAI("m", base_url=URL, client_kwargs={"timeout": value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_retries", -1), ("max_retries", True), ("max_connections", -1), ("max_connections", 1.5)],
)
def test_client_refuses_counts_that_are_none(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be a whole number"):
        OpenAI("m", base_url=URL, client_kwargs={setting: value})


@pytest.mark.parametrize("name", ["base_delay_s", "max_delay_s", "attempt_timeout_s"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan, True])
def test_retry_policy_refuses_pauses_without_end(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        RetryPolicy(**{name: value})
