"""A scripted sandbox server: a real HTTP server that answers as it is told to.

It has just enough of the E2B protocol to run commands and keep files, and plays any fault a test
asks for. Its commands are killed as AgentENV's agent kills them: the shell alone, not its children.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

NOW = "2026-01-01T00:00:00Z"


@dataclass
class Fault:
    """What a matching request gets instead of its answer."""

    method: str
    path: str
    status: int = 500
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    times: int = 1
    act: str = "answer"  # answer | hang | drop | late (do it, then answer with the fault)
    seen: int = 0


@dataclass
class FakeSandbox:
    id: str
    root: Path
    body: dict[str, Any]
    key: str
    ends_at: float
    state: str = "running"
    processes: list[subprocess.Popen[bytes]] = field(
        default_factory=lambda: list[subprocess.Popen[bytes]]()
    )

    def info(self) -> dict[str, Any]:
        return {
            "sandboxID": self.id,
            "templateID": self.body.get("templateID", "t"),
            "clientID": "c",
            "envdVersion": "0.5.15",
            "startedAt": NOW,
            "endAt": NOW,
            "cpuCount": 1,
            "memoryMB": 128,
            "diskSizeMB": 128,
            "state": self.state,
            "metadata": self.body.get("metadata", {}),
        }


class ScriptedServer:
    """Faults are taken in order; everything else is served."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.killed: list[str] = []
        self.released = threading.Event()
        self.on_request: Callable[[str, str], None] | None = None
        self.filters_lists = True
        self.creating = 0
        self.most_creating = 0
        self.create_delay_s = 0.0
        self.stopped = False
        self.lock = threading.Lock()
        self.base = Path(tempfile.mkdtemp(prefix="scripted-"))
        server = self

        class Handler(_Handler):
            app = server

        self.http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def fault(self, method: str, path: str, **what: Any) -> Fault:
        made = Fault(method, path, **what)
        self.faults.append(made)
        return made

    def kill_sandbox(self, sandbox_id: str) -> None:
        """The sandbox goes without anybody having asked for it."""
        with self.lock:
            sandbox = self.sandboxes.pop(sandbox_id)
        for process in sandbox.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def count(self, method: str, path: str) -> int:
        return sum(1 for m, p, _, _ in self.requests if m == method and re.fullmatch(path, p))

    def bodies(self, method: str, path: str) -> list[Any]:
        return [b for m, p, _, b in self.requests if m == method and re.fullmatch(path, p)]

    def stop(self) -> None:
        """The server goes, and every connection with it."""
        self.stopped = True
        self.http.shutdown()
        self.http.server_close()

    def close(self) -> None:
        self.released.set()
        for sandbox_id in list(self.sandboxes):
            self.kill_sandbox(sandbox_id)
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # dropped connections are part of the script


class _Handler(BaseHTTPRequestHandler):
    app: ScriptedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        self.serve()

    do_POST = do_DELETE = do_PUT = do_GET

    def serve(self) -> None:
        raw = self.read_body()
        path, _, query = self.path.partition("?")
        try:
            body = json.loads(
                raw[5:] if "connect+json" in self.headers.get("content-type", "") else raw
            )
        except ValueError:
            body = raw
        self.app.requests.append(
            (self.command, path, {k.lower(): v for k, v in self.headers.items()}, body)
        )
        if self.app.on_request is not None:
            self.app.on_request(self.command, path)
        fault = self.next_fault(path)
        if fault is not None and fault.act == "hang":
            self.app.released.wait(30)
            self.close_connection = True
            return
        if self.app.stopped or (fault is not None and fault.act == "drop"):
            self.drop()
            return
        if fault is not None and fault.act == "answer":
            self.answer(fault.status, fault.body, fault.headers)
            return
        if fault is not None:  # late
            self.dispatch(path, query, body, silent=True)
            self.answer(fault.status, fault.body, fault.headers)
            return
        self.dispatch(path, query, body)

    def read_body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def next_fault(self, path: str) -> Fault | None:
        with self.app.lock:
            for fault in self.app.faults:
                if (
                    fault.method == self.command
                    and re.fullmatch(fault.path, path)
                    and fault.seen < fault.times
                ):
                    fault.seen += 1
                    return fault
        return None

    def drop(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def answer(self, status: int, body: str | bytes, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def json(self, status: int, body: Any) -> None:
        self.answer(status, json.dumps(body), {"content-type": "application/json"})

    def dispatch(self, path: str, query: str, body: Any, silent: bool = False) -> None:
        app = self.app
        parts = path.strip("/").split("/")
        if path == "/v2/sandboxes" and self.command == "POST":
            sandbox = self.create(body)
            if not silent:
                self.json(201, sandbox.info())
        elif path == "/v2/sandboxes":
            wanted = dict(
                urllib.parse.parse_qsl(
                    urllib.parse.unquote(dict(urllib.parse.parse_qsl(query)).get("metadata", ""))
                )
            )
            found = [
                s.info()
                for s in app.sandboxes.values()
                if not app.filters_lists
                or all(s.body.get("metadata", {}).get(k) == v for k, v in wanted.items())
            ]
            self.json(200, found)
        elif "sandboxes" in parts:
            self.control(parts[parts.index("sandboxes") + 1 :], body)
        elif parts[0] == "templates" and self.command == "DELETE":
            self.answer(204, b"")
        else:
            self.data(path, query, body)

    def create(self, body: Any) -> FakeSandbox:
        app = self.app
        with app.lock:
            app.creating += 1
            app.most_creating = max(app.most_creating, app.creating)
        if app.create_delay_s:
            time.sleep(app.create_delay_s)
        sandbox_id = "sb" + uuid.uuid4().hex[:12]
        root = app.base / sandbox_id
        root.mkdir()
        sandbox = FakeSandbox(
            sandbox_id,
            root,
            body,
            self.headers.get("x-api-key", ""),
            time.monotonic() + body.get("timeout", 300),
        )
        with app.lock:
            app.sandboxes[sandbox_id] = sandbox
            app.creating -= 1
        return sandbox

    def control(self, parts: list[str], body: Any) -> None:
        app = self.app
        sandbox = app.sandboxes.get(parts[0])
        action = parts[1] if len(parts) > 1 else ""
        if sandbox is None:
            self.json(404, {"code": 404, "message": f"sandbox {parts[0]} not found"})
        elif self.command == "DELETE":
            app.kill_sandbox(sandbox.id)
            app.killed.append(sandbox.id)
            self.answer(204, b"")
        elif action == "":
            self.json(200, sandbox.info())
        elif action == "connect":
            sandbox.state = "running"
            sandbox.ends_at = max(sandbox.ends_at, time.monotonic() + body["timeout"])
            self.json(200, sandbox.info())
        elif action == "timeout":
            sandbox.ends_at = time.monotonic() + body["timeout"]
            self.answer(204, b"")
        elif action == "fork":
            made: list[Any] = []
            for _ in range(body.get("count", 1)):
                child = self.create({**sandbox.body})
                shutil.copytree(sandbox.root, child.root, dirs_exist_ok=True)
                made.append({"sandbox": child.info()})
            self.json(201, made)
        elif action == "snapshots":
            self.json(201, {"snapshotID": "snap-1", "names": []})
        else:
            self.json(404, {"code": 404, "message": "no such route"})

    def data(self, path: str, query: str, body: Any) -> None:
        sandbox = self.app.sandboxes.get(self.headers.get("e2b-sandbox-id", ""))
        if sandbox is None:
            self.answer(404, "sandbox not found")
            return
        if sandbox.state == "paused":
            self.answer(410, "sandbox is not proxyable in its current state")
            return
        if path == "/health":
            self.answer(204, b"")
        elif path == "/files":
            self.files(sandbox, dict(urllib.parse.parse_qsl(query)), body)
        elif path == "/process.Process/Start":
            self.run(sandbox, body)
        elif path == "/process.Process/SendSignal":
            self.json(200, {})
        else:
            self.answer(404, "no such route")

    def files(self, sandbox: FakeSandbox, query: dict[str, str], body: Any) -> None:
        target = sandbox.root / query["path"].lstrip("/")
        if self.command == "GET":
            if not target.is_file():
                self.json(404, {"code": 404, "message": f"path {query['path']!r} does not exist"})
                return
            self.answer(200, target.read_bytes(), {"content-type": "application/octet-stream"})
            return
        boundary = self.headers["content-type"].partition("boundary=")[2].encode()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        data = raw.split(b"--" + boundary)[1].partition(b"\r\n\r\n")[2][:-2]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self.json(200, [{"name": target.name, "type": "file", "path": query["path"]}])

    def run(self, sandbox: FakeSandbox, body: Any) -> None:
        process = body["process"]
        cwd = process.get("cwd") or str(sandbox.root)
        if not Path(cwd).is_dir():
            self.connect_error("invalid_argument", f"cwd {cwd!r} does not exist")
            return
        timeout_ms = int(self.headers.get("connect-timeout-ms") or 0)
        child = subprocess.Popen(
            [process["cmd"], *process["args"]],
            cwd=cwd,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(sandbox.root),
                **sandbox.body.get("envVars", {}),
                **process.get("envs", {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        sandbox.processes.append(child)
        timer = threading.Timer(timeout_ms / 1000, child.kill) if timeout_ms else None
        if timer:
            timer.daemon = True
            timer.start()
        self.send_response(200)
        self.send_header("content-type", "application/connect+json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        write = threading.Lock()
        self.event(write, {"start": {"pid": child.pid}})

        def pump(name: str) -> None:
            stream = getattr(child, name)
            while chunk := stream.read1(1000):
                with contextlib.suppress(OSError):
                    self.event(write, {"data": {name: base64.b64encode(chunk).decode()}})
            stream.close()

        pumps = [
            threading.Thread(target=pump, args=(n,), daemon=True) for n in ("stdout", "stderr")
        ]
        for thread in pumps:
            thread.start()
        code = child.wait()
        if timer:
            timer.cancel()
        if sandbox.id not in self.app.sandboxes:
            self.drop()
            return
        for thread in pumps:
            thread.join()
        self.event(
            write,
            {"end": {"exitCode": code if code >= 0 else -1, "exited": code >= 0, "status": "done"}},
        )
        self.envelope(2, {})
        self.wfile.write(b"0\r\n\r\n")

    def connect_error(self, code: str, message: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/connect+json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.envelope(2, {"error": {"code": code, "message": message}})
        self.wfile.write(b"0\r\n\r\n")

    def event(self, lock: threading.Lock, event: dict[str, Any]) -> None:
        with lock:
            self.envelope(0, {"event": event})

    def envelope(self, flags: int, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        frame = struct.pack(">BI", flags, len(data)) + data
        self.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    yield made
    made.close()


@pytest.fixture
def new_server() -> Iterator[Callable[[], ScriptedServer]]:
    made: list[ScriptedServer] = []

    def make() -> ScriptedServer:
        made.append(ScriptedServer())
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def make_env(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    from twinkle_agentic.envs.agentenv import AgentEnv

    for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made: list[Any] = []

    def make(**arguments: Any) -> Any:
        given: dict[str, Any] = {"template": "base", "api_url": server.url, "request_timeout": 5.0}
        env = AgentEnv(**{**given, **arguments})
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()
