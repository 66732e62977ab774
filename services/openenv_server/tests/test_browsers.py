"""No page in a browser drives the server, whatever address the page came from."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import MutableMapping
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from openenv_server._access import AccessGuard

LIMIT_S = 20.0
FOREIGN = ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example"]


def _post(server: Any, headers: dict[str, str]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{server.url}/step",
        data=json.dumps({"action": {"code": "print(1)"}}).encode(),
        headers={"Content-Type": "application/json", **headers},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=LIMIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("origin", FOREIGN)
async def test_a_foreign_page_gets_no_websocket(server: Any, origin: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        async with connect(server.ws_url, proxy=None, additional_headers={"Origin": origin}):
            pass
    assert caught.value.response.status_code == 403


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_page_gets_no_http(server: Any, origin: str) -> None:
    status, text = _post(server, {"Origin": origin})
    assert status == 403
    assert origin in text
    assert "ALLOWED_HOSTS" in text


def test_a_name_that_was_pointed_at_this_machine_is_refused(server: Any) -> None:
    """DNS rebinding: the page and the server have the same origin then."""
    evil = f"evil.example:{server.port}"
    status, text = _post(server, {"Host": evil, "Origin": f"http://{evil}"})
    assert status == 403
    assert "evil.example" in text
    assert _post(server, {"Host": evil})[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_a_page_of_the_server_itself_may(server: Any, host: str) -> None:
    here = f"{host}:{server.port}"
    assert _post(server, {"Host": here, "Origin": f"http://{here}"})[0] == 200


async def test_a_client_that_is_no_browser_sends_no_origin(server: Any) -> None:
    assert _post(server, {})[0] == 200
    async with connect(server.ws_url, proxy=None) as ws:
        await ws.close()


async def _ask(scope: dict[str, Any], allowed: tuple[str, ...]) -> bool:
    passed: list[bool] = []

    async def app(*_: object) -> None:
        passed.append(True)

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            passed.append(False)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    await AccessGuard(app, allowed_hosts=allowed)(scope, receive, send)
    return passed[0]


@pytest.mark.parametrize(
    ("address", "host", "origin", "allowed", "passes"),
    [
        ("127.0.0.1", "env.example", None, (), False),
        ("127.0.0.1", "env.example", None, ("env.example",), True),
        ("127.0.0.1", "env.example", "https://env.example", ("env.example",), True),
        ("127.0.0.1", "127.0.0.1:8000", "https://env.example", ("env.example",), True),
        ("10.0.0.5", "env.example", None, (), True),
        ("10.0.0.5", "env.example", "https://other.example", (), False),
        ("::1", "[::1]:8000", None, (), True),
        ("127.0.0.1", "", None, (), False),
    ],
)
async def test_which_requests_pass(
    address: str, host: str, origin: str | None, allowed: tuple[str, ...], passes: bool
) -> None:
    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    scope = {"type": "http", "path": "/step", "server": (address, 8000), "headers": headers}
    assert await _ask(scope, allowed) is passes
