"""Random requests to a real server: no internal error, nothing in its log, no growth.

`nox -s fuzz` runs them: 20,000 requests, or as many as `FUZZ_REQUESTS` says. The examples are the
same each time, unless `FUZZ_SEED` is another number.
"""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import socket
import struct
import tarfile
import tempfile
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from twinkle_isolation import Launcher, Limits, SandboxSpec, SandboxStartError

from .conftest import KEY, start_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "20000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
ID = "{id}"  # stands for the sandbox of the moment
MAX_GROWTH_BYTES = 64 << 20
# What a request may be answered with by this server's own word; anything else is a fault of it.
EXPECTED = {501, 502, 504, 507}


@dataclass
class Target:
    """The server, its log, and one sandbox that lives while requests come."""

    url: str
    pid: int
    client: httpx.Client
    log: Path
    sandbox_id: str = ""
    token: str = ""
    traffic_token: str = ""
    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter[int])

    def new_sandbox(self) -> None:
        for record in self.client.get("/sandboxes").json():
            self.client.delete(f"/sandboxes/{record['sandboxID']}")
        answer = self.client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 3600})
        assert answer.status_code == 201, answer.text
        self.sandbox_id = answer.json()["sandboxID"]
        self.token = answer.json()["envdAccessToken"]
        self.traffic_token = answer.json()["trafficAccessToken"]

    def headers(self) -> dict[str, str]:
        return {"E2b-Sandbox-Id": self.sandbox_id, "X-Access-Token": self.token}

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def send(self, method: str, path: str, **arguments: Any) -> httpx.Response | None:
        """Send one request; `None` where the client itself finds that it cannot be one."""
        self.sent += 1
        url = path.replace(ID, self.sandbox_id)
        try:
            answer = self.client.request(method, url, **arguments)
        except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError, ValueError):
            return None
        status = answer.status_code
        self.statuses[status] += 1
        assert status < 500 or status in EXPECTED, (method, url, arguments, answer.text[:500])
        if status == 502 and "e2b-sandbox-id" in answer.request.headers:
            self.new_sandbox()
        return answer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    log = tmp_path_factory.mktemp("fuzz") / "stderr"
    options = ["--memory-mb", "128", "--disk-mb", "32", "--processes", "32", "--spares", "2"]
    options += ["--run-timeout-s", "120"]  # code that no limit of its own stops would be noticed
    options += ["--max-sandboxes", "12", "--max-output-mb", "2", "--api-key", KEY]
    with log.open("wb") as file:
        prelude = f"import os; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND), 2)"
        server = start_server("bubblewrap", *options, prelude=prelude)
        client = httpx.Client(base_url=server.url, headers={"X-API-Key": KEY}, timeout=60)
        target = Target(server.url, server.process.pid, client, log)
        target.new_sandbox()
        yield target
        client.close()
        server.stop()
        file.flush()
        assert server.process.stdout is not None
        server.process.stdout.close()


def fuzz(share: float) -> Callable[[Any], Any]:
    """Run a test with this share of all requests, after some that warm the server up."""

    def decorate(test: Any) -> Any:
        return seed(SEED)(
            settings(
                max_examples=max(10, int(REQUESTS * share)),
                deadline=None,
                database=None,
                phases=[Phase.generate],  # to make an example smaller can take an hour here
                suppress_health_check=[
                    HealthCheck.too_slow,
                    HealthCheck.data_too_large,
                    HealthCheck.large_base_example,
                    HealthCheck.filter_too_much,
                ],
            )(test)
        )

    return decorate


@pytest.fixture(autouse=True)
def healthy(target: Target) -> Iterator[None]:
    for _ in range(300):  # so that what is made once is made already
        target.send("GET", "/health")
        target.send("POST", "/filesystem.Filesystem/ListDir", json={}, headers=target.headers())
    before = target.resident_bytes()
    yield
    answer = target.client.get("/health")
    assert answer.json()["status"] == "ok"
    target.new_sandbox()
    listed = target.client.post(
        "/filesystem.Filesystem/ListDir", json={"path": "/"}, headers=target.headers()
    )
    assert listed.status_code == 200
    assert target.log.read_text() == ""
    growth = target.resident_bytes() - before
    print(f"\n{target.sent} requests so far; memory of the server {growth / 2**20:+.1f} MB here")
    assert growth < MAX_GROWTH_BYTES


# Values

text = st.text(max_size=40)
names = st.one_of(
    st.sampled_from(
        ["", ".", "..", "/", "~", "a", "a/b", "/tmp/x", "/proc/self/mem", "/dev/zero",
         "/etc/passwd", "../../etc/passwd", "/root", "a\0b", "x" * 300, "d/" * 3000, "\ud800"]
    ),
    text,
)  # fmt: skip
scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308]),
    names,
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = [
    "templateID", "timeout", "metadata", "envVars", "autoPause", "autoResume", "network", "secure",
    "allow_internet_access", "iam", "mcp", "volumeMounts", "memory", "count", "duration", "name",
    "names", "tags", "alias", "cpuCount", "memoryMB", "fromTemplate", "fromImage", "steps",
    "startCmd", "readyCmd", "path", "source", "destination", "depth", "recursive", "watcherId",
    "process", "pid", "input", "stdin", "signal", "pty", "size", "cmd", "args",
    "envs", "cwd", "tag", "selector",
]  # fmt: skip
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)
header_names = st.sampled_from(
    ["Content-Type", "Authorization", "X-Access-Token", "E2b-Sandbox-Port", "Idempotency-Key",
     "Content-Encoding", "Connect-Timeout-Ms", "Keepalive-Ping-Interval", "Origin", "Range",
     "Connect-Protocol-Version", "X-Metadata-A", "Accept-Encoding", "Expect"]
)  # fmt: skip
header_values = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "1", "99999999999", "gzip", "application/json", "multipart/form-data",
         "multipart/form-data; boundary=b", "application/connect+json", "application/octet-stream",
         "Basic cm9vdDo=", "Basic !", "Bearer x", "49983", "100-continue", "bytes=0-1"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
)  # fmt: skip
headers = st.dictionaries(header_names, header_values, max_size=3)
raw_bodies = st.one_of(
    bodies.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=200),
    st.sampled_from([b"", b"null", b"[]", b"{", b'"', b"[" * 2000, b'{"a":1e999}', b"\xff"]),
)
queries = st.dictionaries(
    st.sampled_from(
        ["path", "username", "signature", "signature_expiration", "limit", "nextToken", "state",
         "metadata", "template", "order", "startedAfter", "logsOffset", "level"]
    ),
    names,
    max_size=3,
)  # fmt: skip
CONTROL = [
    "/sandboxes", "/v2/sandboxes", "/sandboxes/{id}", "/v2/sandboxes/{id}",
    "/sandboxes/{id}/connect",
    "/sandboxes/{id}/resume", "/sandboxes/{id}/pause", "/sandboxes/{id}/timeout",
    "/sandboxes/{id}/refreshes", "/sandboxes/{id}/fork", "/sandboxes/{id}/metrics",
    "/sandboxes/{id}/network", "/sandboxes/{id}/snapshots", "/snapshots", "/templates",
    "/v2/templates", "/v3/templates", "/templates/base", "/templates/aliases/base",
    "/v2/templates/base/builds/x",
    "/templates/base/builds/x/status", "/health", "/metrics", "/", "//", "/%00",
    "/sandboxes/%2e%2e",
]  # fmt: skip
UNARY = [
    *(f"filesystem.Filesystem/{name}" for name in (
        "Stat", "MakeDir", "Move", "ListDir", "Remove", "CreateWatcher", "GetWatcherEvents",
        "RemoveWatcher")),
    *(f"process.Process/{name}" for name in (
        "List", "SendInput", "SendSignal", "CloseStdin", "Update")),
]  # fmt: skip
STREAMS = ["process.Process/Start", "process.Process/Connect", "process.Process/StreamInput",
           "filesystem.Filesystem/WatchDir"]  # fmt: skip
methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])


def query_of(parameters: dict[str, str]) -> str:
    return urllib.parse.urlencode(parameters, errors="surrogatepass") if parameters else ""


# The surfaces


@fuzz(0.3)
@given(methods, st.one_of(st.sampled_from(CONTROL), text.map("/{}".format)), queries, headers,
       raw_bodies)  # fmt: skip
def test_the_control_plane(
    target: Target,
    method: str,
    path: str,
    query: dict[str, str],
    more: dict[str, str],
    body: bytes,
) -> None:
    url = f"{urllib.parse.quote(path, safe='/%{}', errors='replace')}?{query_of(query)}"
    target.send(method, url, headers=more, content=body)
    if path.endswith(("/sandboxes", "/fork", "/pause", "/connect", "/resume", ID)):
        state = target.client.get(f"/sandboxes/{target.sandbox_id}")
        if state.status_code != 200 or len(target.client.get("/sandboxes").json()) > 8:
            target.new_sandbox()


@fuzz(0.2)
@given(methods, st.sampled_from(["/files", *(f"/{name}" for name in UNARY)]), queries, headers,
       raw_bodies)  # fmt: skip
def test_requests_to_a_sandbox(
    target: Target,
    method: str,
    path: str,
    query: dict[str, str],
    more: dict[str, str],
    body: bytes,
) -> None:
    url = f"{path}?{query_of(query)}"
    target.send(method, url, headers=target.headers() | more, content=body)


commands: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "cmd": st.one_of(st.sampled_from(["true", "cat", "/bin/echo", "", "/"]), text),
        "args": st.one_of(values, st.lists(text, max_size=3)),
        "cwd": names,
        "envs": st.dictionaries(text, text, max_size=3),
    },
)
programs: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"process": st.one_of(values, commands)},
    optional={"stdin": values, "pty": values, "tag": values},
)
envelopes = st.tuples(
    st.sampled_from([0, 0, 0, 0, 1, 2, 3, 255]),
    st.one_of(
        raw_bodies, st.one_of(bodies, programs).map(lambda value: json.dumps(value).encode())
    ),
    st.sampled_from([0, 0, 0, 0, -1, 1, 2**31]),
)


@fuzz(0.25)
@given(st.sampled_from(STREAMS), st.lists(envelopes, max_size=3), st.binary(max_size=6))
def test_connect_frames(
    target: Target, method: str, frames: list[tuple[int, bytes, int]], rest: bytes
) -> None:
    body = b"".join(
        struct.pack("!BI", flags, max(0, len(data) + wrong)) + data for flags, data, wrong in frames
    )
    more = {"Content-Type": "application/connect+json", "Connect-Timeout-Ms": "150"}
    answer = target.send("POST", f"/{method}", headers=target.headers() | more, content=body + rest)
    assert answer is None or b'"code":"internal"' not in answer.content, answer.content[-500:]


@fuzz(0.15)
@given(names, names, st.binary(max_size=100), st.sampled_from(["user", "root"]))
def test_names_of_files(target: Target, name: str, other: str, data: bytes, user: str) -> None:
    sent = target.headers()
    query = query_of({"path": name, "username": user})
    written = target.send("POST", f"/files?{query}", headers=sent, files={"file": (name, data)})
    if written is not None and written.status_code == 200:
        read = target.send("GET", f"/files?{query}", headers=sent)
        assert read is None or read.content == data
    message = {"path": name, "source": name, "destination": other}
    body = json.dumps(message).encode()
    for method in ("Stat", "Move", "ListDir", "Remove"):
        target.send("POST", f"/filesystem.Filesystem/{method}", headers=sent, content=body)


@fuzz(0.1)
@given(st.dictionaries(text, st.one_of(text, values), max_size=4))
def test_environments(target: Target, env: dict[str, Any]) -> None:
    message = {"process": {"cmd": "/usr/bin/env", "args": ["-0"], "envs": env}}
    data = json.dumps(message).encode()
    more = {"Content-Type": "application/connect+json", "Connect-Timeout-Ms": "5000"}
    body = struct.pack("!BI", 0, len(data)) + data
    answer = target.send("POST", "/process.Process/Start", headers=target.headers() | more,
                         content=body)  # fmt: skip
    assert answer is not None
    assert b'"code":"internal"' not in answer.content, answer.content[-500:]


# The code interpreter

CODES = [
    "1", "", "x = 1", "x", "def", "\0", "exit()", "input()", "raise SystemExit(3)",
    "display(1, 2); 3",
    "while True: pass", "import time; time.sleep(60)", "while True: print('x' * 65535)",
    "print('x' * 3_000_000)", "'x' * 3_000_000", "list(range(100_000))", "bytearray(1 << 30)",
    "print('\\ud800')", "'\\ud800'", "raise ValueError('\\ud800')",
    "import os; os.kill(os.getpid(), 9)", "import os; os.kill(0, 9)", "import os; os._exit(3)",
    "import os\nif os.fork() == 0: 1 / 0", "import os\nwhile True: os.fork()",
    "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "import sys\nsys.stdout.close(); 1", "import os\nfor fd in (0, 1, 2): os.close(fd)",
    "import os\nos.close(3)", "import os\nos.close(4); 1", "import os\nos.closerange(0, 100)",
    "import os\nos.write(3, b'\\0\\0\\0\\2{}')", "import os\nos.write(3, b'\\xff' * 70_000)",
    "import os\nos.write(4, b'{\"main\": 1, \"data\": {\"application/json\": 1e999}}\\n')",
    "import os\nos.write(4, b'[]\\n1\\n{\"error\": 1}\\n{\"main\": 1, \"data\": []}\\n\\xff\\n{')",
    "import sys; sys.displayhook = None\n1", "import builtins; builtins.display = None\ndisplay(1)",
    "import builtins; del builtins.repr, builtins.str\n1", "import json; json.dumps = 1\n{}",
    "import sys; sys.excepthook = None; sys.modules.clear()\n1 / 0",
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "class A:\n    def __repr__(self): raise SystemExit\nA()",
    "class A(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise A",
    "class A:\n    def _repr_mimebundle_(self): return {None: float('nan'), '': [self]}\nA()",
    "class A:\n    def _repr_json_(self): return {1: b'', (): {'a': float('inf')}}\nA()",
    "class A:\n    def _repr_png_(self): return bytes(1_000_000)\nA()",
]  # fmt: skip
NESTED = "x = []\nfor _ in range({}): x = [x]\nclass A:\n    def _repr_json_(self): return x\nA()"
codes = st.one_of(
    st.sampled_from(CODES), st.integers(850, 1000).map(NESTED.format), st.text(max_size=20)
)
environments = st.dictionaries(
    st.text(st.characters(exclude_characters="=\0", exclude_categories=["Cs"]), min_size=1),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    max_size=2,
)
INTERPRETER = ["/execute", "/contexts", "/contexts/{context}", "/contexts/{context}/restart",
               "/contexts/x", "/contexts/", "/health", "/%00"]  # fmt: skip
COUNT = "import os\nlen([name for name in os.listdir('/proc') if name.isdigit()])"


def strict(line: str) -> Any:
    """Return a line of JSON; one with `NaN` or `Infinity`, which is none, fails."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in {line[:200]}"))


class Interpreter:
    """The requests to the code interpreter of the sandbox of the moment."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def headers(self, token: str | None = None) -> dict[str, str]:
        token = self.target.traffic_token if token is None else token
        sandbox = {"E2b-Sandbox-Id": self.target.sandbox_id, "E2b-Sandbox-Port": "49999"}
        return sandbox | {"E2b-Traffic-Access-Token": token}

    def contexts(self) -> list[str]:
        answer = self.target.send("GET", "/contexts", headers=self.headers())
        assert answer is not None and answer.status_code == 200, answer
        return [context["id"] for context in answer.json()]

    def execute(self, **body: Any) -> list[dict[str, Any]]:
        """Run code and return its events; none where the sandbox ended."""
        try:
            answer = self.target.send("POST", "/execute", headers=self.headers(), json=body)
        except httpx.RemoteProtocolError:
            state = self.target.client.get(f"/sandboxes/{self.target.sandbox_id}")
            assert state.status_code == 404, (body, state.text)
            self.target.new_sandbox()
            return []
        assert answer is not None and answer.status_code == 200, (body, answer)
        events = [strict(line) for line in answer.text.splitlines()]
        assert events[-1] == {"type": "end_of_execution"}, (body, events)
        return events

    def programs(self) -> int:
        """Return how many programs there are in the sandbox; one interpreter is among them."""
        for context in self.contexts():
            path = f"/contexts/{context}"
            answer = self.target.send("DELETE", path, headers=self.headers())
            assert answer is not None and answer.status_code in (200, 404)
        texts = [event["text"] for event in self.execute(code=COUNT) if event["type"] == "result"]
        return int(texts[0])

    def leave(self, method: str, path: str, body: bytes, wait_bytes: int) -> socket.socket:
        """Send a request; the client of it leaves when the socket is closed."""
        self.target.sent += 1
        url = httpx.URL(self.target.url)
        connection = socket.create_connection((url.host, url.port), timeout=60)
        head = {"Host": "localhost", "Content-Length": str(len(body)), **self.headers()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {head[name]}" for name in head)]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        if wait_bytes:
            connection.recv(wait_bytes)
        return connection


@fuzz(0.1)
@given(
    methods,
    st.sampled_from(INTERPRETER),
    st.sampled_from(["right", "right", "envd", "wrong", "none", ""]),
    st.one_of(
        raw_bodies,
        st.dictionaries(
            st.sampled_from(["code", "context_id", "contextId", "language", "env_vars", "timeout",
                             "cwd"]),
            st.one_of(values, st.sampled_from(["python", "Python ", "r", "/tmp", 0.05])),
            max_size=4,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    headers,
)  # fmt: skip
def test_requests_to_the_interpreter(
    target: Target, method: str, path: str, token: str, body: bytes, more: dict[str, str]
) -> None:
    interpreter = Interpreter(target)
    contexts = interpreter.contexts()
    sent = interpreter.headers(target.traffic_token if token == "right" else token)
    if token == "envd":
        sent["X-Access-Token"] = target.token
    url = path.format(context=contexts[-1])
    answer = target.send(method, url, headers=sent | more, content=body)
    if answer is not None and token in ("wrong", "none", "") and "X-Access-Token" not in more:
        assert answer.status_code in (401, 502) or path == "/health", answer.text
    if len(contexts) > 20:
        target.new_sandbox()


@fuzz(0.02)
@given(codes, st.sampled_from([0.05, 0.3]), st.booleans(), environments)
def test_odd_code(
    target: Target, code: str, timeout: float, other: bool, env_vars: dict[str, str]
) -> None:
    interpreter = Interpreter(target)
    context = interpreter.contexts()[-1] if other else None
    body = {"code": code, "context_id": context, "timeout": timeout, "env_vars": env_vars}
    interpreter.execute(**body)


actions = st.tuples(
    st.sampled_from(["execute", "execute", "create", "remove", "restart"]),
    st.one_of(st.just("while True: pass"), codes),
    st.sampled_from([0, 0, 1, 500]),
)


@fuzz(0.01)
@given(st.lists(actions, min_size=1, max_size=5), st.booleans())
def test_clients_of_the_interpreter_that_leave(
    target: Target, what: list[tuple[str, str, int]], reset: bool
) -> None:
    target.new_sandbox()
    interpreter = Interpreter(target)
    alone = interpreter.programs()
    (context,) = interpreter.contexts()
    connections: list[socket.socket] = []
    for action, code, wait_bytes in what:
        method, path, message = "POST", "/execute", {"code": code, "context_id": context}
        if action == "create":
            path, message = "/contexts", {}
        elif action == "remove":
            method, path, message = "DELETE", f"/contexts/{context}", {}
        elif action == "restart":
            path, message = f"/contexts/{context}/restart", {}
        body = json.dumps(message).encode()
        connections.append(interpreter.leave(method, path, body, wait_bytes))
    for connection in connections:
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    deadline = time.monotonic() + 30
    while (found := interpreter.programs()) > alone:
        assert time.monotonic() < deadline, (what, found, alone)
        time.sleep(0.02)


def test_enough_requests_were_sent(target: Target) -> None:
    print(f"\nanswers by status: {dict(sorted(target.statuses.items()))}")
    assert target.sent >= REQUESTS


# Archives


def broken_archive(seed: int) -> bytes:
    """Return a tar file that no archiver writes, or one with some bytes changed."""
    chance = random.Random(seed)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for _ in range(chance.randrange(6)):
            name = chance.choice(
                ["a", "/etc/passwd", "../../x", "d/e", "d", "proc/1/x", "n" * 5000]
            )
            member = tarfile.TarInfo(name)
            member.type = chance.choice(
                [b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"S", b"x", b"\xff"]
            )
            member.linkname = chance.choice(["", "/etc", "..", name, "a"])
            member.mode = chance.randrange(0o10000)
            member.mtime = chance.choice([0, -1, 2**40, 1.5])
            member.size = chance.choice([0, 3]) if member.type in (b"0", b"S") else 0
            with contextlib.suppress(Exception):
                tar.addfile(member, io.BytesIO(b"abc"))
    data = bytearray(file.getvalue())
    for _ in range(chance.choice([0, 0, 1, 30])):
        data[chance.randrange(min(len(data), 3000))] = chance.randrange(256)
    return bytes(data[: chance.choice([len(data), len(data), chance.randrange(len(data))])])


@pytest.mark.parametrize("isolation", ["bubblewrap"])
async def test_archives(isolation: Any) -> None:
    limits = Limits(memory_bytes=96 << 20, disk_bytes=16 << 20, processes=16)
    spec = SandboxSpec(limits=limits)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "archive")
        async with Launcher(isolation=isolation) as launcher:
            started = 0
            for number in range(max(20, REQUESTS // 50)):
                await asyncio.to_thread(path.write_bytes, broken_archive(SEED * 10**6 + number))
                try:
                    async with asyncio.timeout(30):
                        sandbox = await launcher.create(spec, archive=path)
                except SandboxStartError:
                    continue
                started += 1
                await sandbox.kill()
            assert started
            async with await launcher.create(spec) as sandbox:
                assert (await sandbox.exec(["true"])).end.exit_code == 0
