"""What the command line refuses before a command begins."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from twinkle_agentic.rollout.cli.app import app


@pytest.mark.parametrize("option", ["--deadline-s", "--request-timeout-s", "--step-timeout-s"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e300", "0", "-1"])
def test_a_limit_that_bounds_nothing_is_refused(option: str, value: str) -> None:
    given = ["run", "tasks.jsonl", "--env", "e:E", "--model", "m", "--model-url", "http://h/v1"]
    result = CliRunner().invoke(app, [*given, option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize("value", ["inf", "nan", "-1"])
def test_a_temperature_that_no_endpoint_takes_is_refused(value: str) -> None:
    given = ["run", "tasks.jsonl", "--env", "e:E", "--model", "m", "--model-url", "http://h/v1"]
    result = CliRunner().invoke(app, [*given, "--temperature", value])
    assert result.exit_code == 2
    assert "Invalid value for '--temperature'" in result.output
