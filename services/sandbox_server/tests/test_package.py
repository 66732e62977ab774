from __future__ import annotations

import sandbox_server
from sandbox_server import ServerConfig


def test_all_names_resolve() -> None:
    assert [name for name in sandbox_server.__all__ if not hasattr(sandbox_server, name)] == []


def test_the_default_is_loopback_without_network_and_bounded() -> None:
    config = ServerConfig()
    assert config.api_key is None
    assert not config.network
    assert 0 < config.default_timeout_s < config.max_timeout_s < config.max_lifetime_s
    assert config.max_sandboxes > 0
