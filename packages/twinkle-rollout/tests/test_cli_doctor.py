"""Which distribution a module comes from, and what servers answer."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from twinkle_agentic.rollout.cli.doctor import doctor, module_origins, print_probes
from twinkle_agentic.rollout.cli.probes import (
    Probe,
    probe_coding,
    probe_model,
    probe_openenv,
    probe_sandboxes,
)
from twinkle_agentic.rollout.testing import ServerProcess, free_port


def test_our_modules_come_from_our_distributions() -> None:
    origins = {origin.module: origin for origin in module_origins()}
    assert origins["twinkle_agentic.tools.tool_manager"].provider == "twinkle-tools"
    assert origins["twinkle_agentic.envs.base"].provider == "twinkle-envs-core"
    assert all(origin.ok for origin in origins.values())


def test_a_foreign_module_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "twinkle_agentic"
    (foreign / "protocol").mkdir(parents=True)
    for path in (foreign / "__init__.py", foreign / "protocol/__init__.py"):
        path.write_text("")
    (foreign / "protocol/openai.py").write_text("class OpenAI: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    for name in [m for m in sys.modules if m.split(".")[0] == "twinkle_agentic"]:
        monkeypatch.delitem(sys.modules, name)
    origins = {origin.module: origin for origin in module_origins()}
    wrong = origins["twinkle_agentic.protocol.openai"]
    assert wrong.provider == "?"
    assert not wrong.ok
    text = io.StringIO()
    assert doctor(Console(file=text, width=200)) == 1
    assert "--force-reinstall --no-deps twinkle-rollout" in text.getvalue()


def test_a_live_endpoint_is_ok_and_a_dead_one_is_exit_code_1() -> None:
    module = "twinkle_agentic.rollout.cli.scripted_endpoint"
    with ServerProcess(
        "endpoint", lambda port: [sys.executable, "-m", module, "--port", str(port)]
    ) as server:
        server.wait_ready(30)
        alive = probe_model(f"{server.url}/v1")
        assert (alive.ok, alive.detail) == (True, "models: scripted-policy")
        text, dead = io.StringIO(), f"http://127.0.0.1:{free_port()}"
        console, live = Console(file=text, width=200), [f"{server.url}/v1"]
        assert doctor(console, model_url=live, openenv_url=[dead]) == 1
        assert "Connection refused" in text.getvalue()
        assert doctor(console, model_url=live) == 0


def test_no_address_is_cut_on_a_narrow_screen() -> None:
    address = "http://inference.cluster.example.org:8000/v1"
    answer = f"HTTP 404 from /models: did you mean {address}?"
    probe = Probe(name="model endpoint", url=address, ok=False, detail=answer, seconds=0.1)
    text = io.StringIO()
    print_probes(Console(file=text, width=80), [probe])
    rows = [line.split("│") for line in text.getvalue().splitlines() if line.count("│") == 5]
    assert "".join(row[2].strip() for row in rows) == address
    assert "".join(row[3].strip() for row in rows).endswith(f"{address}?")


def test_a_url_that_is_none_is_an_answer_not_a_crash() -> None:
    assert not probe_openenv("nonsense").ok
    assert not probe_openenv("http://[::bad").ok


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Generator[str, None, None]:
    """Serve HTTP in threads; give the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(routes: Mapping[str, tuple[int, Any]]) -> Generator[str, None, None]:
    """Serve JSON for `METHOD path`, 404 for the rest; give the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body = routes.get(f"{self.command} {self.path}", (404, {"detail": "no"}))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("status", [400, 422])
def test_an_endpoint_without_a_list_of_models_is_known_by_its_completions(status: int) -> None:
    with answering({"POST /v1/chat/completions": (status, {"error": "no messages"})}) as url:
        probe = probe_model(f"{url}/v1")
    assert (probe.ok, probe.models) == (True, ())
    assert "/chat/completions" in probe.detail


def test_a_server_with_neither_route_is_no_endpoint_but_a_run_may_try_it() -> None:
    with answering({}) as url:
        assert not (probe := probe_model(f"{url}/v1")).ok
        assert "check the host, the port and the path" in probe.detail
        assert probe_model(f"{url}/v1", lenient=True).ok


@pytest.mark.parametrize("guarded", [(200, {"data": [{"id": "m"}]}), (401, {"error": "key"})])
@pytest.mark.parametrize("lenient", [False, True])
def test_the_list_below_v1_is_a_hint_with_a_key_or_without(
    guarded: tuple[int, Any], lenient: bool
) -> None:
    with answering({"GET /v1/models": guarded}) as url:
        probe = probe_model(f"{url}/", lenient=lenient)
        assert not probe.ok
        assert f"did you mean {url}/v1?" in probe.detail


def test_a_wrong_key_is_no_wrong_url() -> None:
    with answering({"GET /v1/models": (401, {}), "GET /v2/sandboxes?limit=1": (401, {})}) as url:
        assert probe_model(f"{url}/v1").detail == "HTTP 401 from /models"
        assert "E2B_API_KEY" in probe_sandboxes(url).detail


def test_a_health_alone_makes_no_openenv_server() -> None:
    with answering({"GET /health": (200, {"status": "ok"})}) as url:
        probe = probe_openenv(url)
    assert (probe.ok, "HTTP 404 from /schema" in probe.detail) == (False, True)


@contextmanager
def dripping(head: bytes, drop: bytes) -> Generator[str, None, None]:
    """Answer with a head, and then for twenty seconds with one drop after the other."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.connection.recv(65536)
                self.connection.sendall(head)
                for _ in range(400):
                    self.connection.sendall(drop)
                    if over.wait(0.05):
                        break

    with serving(Handler) as url:
        try:
            yield url
        finally:
            over.set()


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n"]
)
def test_an_answer_that_never_ends_is_given_up(head: bytes) -> None:
    with dripping(head, b" ") as url:
        probe = probe_model(url, timeout_s=0.3)
    assert (probe.ok, probe.detail) == (False, "no complete answer within 0.3 s")


def test_an_answer_without_measure_is_not_read() -> None:
    with dripping(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 2**20) as url:
        probe = probe_model(url, timeout_s=60)
    assert (probe.ok, probe.detail) == (False, "the answer has more than 16 MiB")


@pytest.mark.parametrize("properties", [[1], None, {"x": {}}])
def test_an_odd_schema_is_an_answer_not_a_crash(properties: Any) -> None:
    with answering({"GET /schema": (200, {"action": {"properties": properties}})}) as url:
        assert not probe_coding(url).ok
