import os
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv._config import Connection
from twinkle_agentic.envs.agentenv.errors import SandboxRefusedError


@pytest.fixture(autouse=True)
def clean(monkeypatch: Any) -> None:
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)


def test_one_url_is_enough(monkeypatch: Any) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://10.0.0.5:8000/")
    found = Connection.resolve()
    assert found.api_url == found.sandbox_url == "http://10.0.0.5:8000"
    assert found.api_key == "dummy"


def test_arguments_win_over_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://a")
    monkeypatch.setenv("E2B_SANDBOX_URL", "http://sandboxes-of-a")
    monkeypatch.setenv("E2B_API_KEY", "key-of-a")
    other = Connection.resolve(api_url="http://b", api_key="k")
    assert (other.api_url, other.sandbox_url, other.api_key) == ("http://b", "http://b", "k")
    same = Connection.resolve(api_url="http://a")
    assert (same.sandbox_url, same.api_key) == ("http://sandboxes-of-a", "key-of-a")
    assert Connection.resolve().sandbox_url == "http://sandboxes-of-a"
    assert Connection.resolve(sandbox_url="http://c").sandbox_url == "http://c"


def test_the_cloud_keeps_its_own_sandbox_address() -> None:
    assert Connection.resolve(api_url="https://api.e2b.app", api_key="k").sandbox_url is None
    assert "sandbox_url" not in Connection.resolve(api_key="k").params()


def test_debug_is_never_taken_from_the_environment(monkeypatch: Any) -> None:
    monkeypatch.setenv("E2B_DEBUG", "true")
    assert Connection.resolve(api_url="http://a").params()["debug"] is False


def test_no_server_at_all_is_said_before_any_request() -> None:
    with pytest.raises(SandboxRefusedError, match="E2B_API_URL"):
        Connection.resolve().params()


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Connection.resolve(api_url="http://a", api_key="secret"))


@pytest.mark.parametrize("url", ["10.0.0.5:8000", "ftp://x", "http://", "x"])
def test_a_url_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(ValueError, match="api_url must be"):
        Connection.resolve(api_url=url)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="proxxy"):
        Connection.resolve(api_url="http://a", options={"proxxy": "x"})


def test_a_proxy_of_the_environment_is_named(monkeypatch: Any) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    connection = Connection.resolve(api_url="http://10.1.2.3:8000")
    assert connection.proxy_hint() == ""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert "http://proxy:3128" in connection.proxy_hint()
    monkeypatch.setenv("no_proxy", "10.1.2.3")
    assert connection.proxy_hint() == ""
