"""Which hosts are this machine."""

from __future__ import annotations

import pytest

from twinkle_agentic._aio.net import is_loopback


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "a.localhost", "127.8.0.1", "::1"])
def test_names_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", [None, "", "10.0.0.5", "localhost.example.com", "::2", "127.1"])
def test_names_of_others(host: str | None) -> None:
    assert not is_loopback(host)
