"""The code interpreter, by the unmodified SDK `e2b-code-interpreter`."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import base64
import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from e2b.exceptions import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.models import OutputMessage

from .conftest import KEY, Server, http, start_server

Make = Callable[..., Sandbox]


@pytest.fixture(scope="module", params=["bubblewrap", "process"])
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    options = ("--memory-mb", "256", "--processes", "64", "--max-output-mb", "4")
    server = start_server(request.param, *options)
    yield server
    server.stop()
    assert server.process.stdout is not None
    server.process.stdout.close()


@pytest.fixture
def make(running: Server) -> Iterator[Make]:
    made: list[Sandbox] = []

    def create(**arguments: Any) -> Sandbox:
        made.append(Sandbox.create(timeout=120, **arguments, **running.opts))
        return made[-1]

    yield create
    for sandbox in made:
        sandbox.kill()


@pytest.fixture
def sandbox(make: Make) -> Sandbox:
    return make()


def test_names_stay_and_the_last_value_is_the_main_result(sandbox: Sandbox) -> None:
    first = sandbox.run_code("x = 20")
    assert first.results == [] and first.error is None and first.execution_count == 1
    second = sandbox.run_code("display('shown')\nprint('out')\nx + 1")
    assert second.text == "21" and second.execution_count == 2
    assert [(r.text, r.is_main_result) for r in second.results] == [("shown", False), ("21", True)]
    assert "".join(second.logs.stdout) == "out\n" and second.logs.stderr == []


def test_output_arrives_while_the_code_runs(sandbox: Sandbox) -> None:
    code = """
import os, sys, time
print("one"); print("two", file=sys.stderr)
while not os.path.exists("seen"): time.sleep(0.01)
print("三")"""
    lines: list[tuple[str, bool]] = []

    def on_line(message: OutputMessage) -> None:
        lines.append((message.line, message.error))
        if len(lines) == 2:
            sandbox.files.write("seen", "")

    execution = sandbox.run_code(code, on_stdout=on_line, on_stderr=on_line, timeout=60)
    assert execution.error is None
    assert sorted(lines[:2]) == [("one\n", False), ("two\n", True)]
    assert lines[2:] == [("三\n", False)]


def test_rich_results(sandbox: Sandbox) -> None:
    code = """
class Table:
    def _repr_html_(self): return "<table>"
    def _repr_json_(self): return {"rows": [1, float("nan")]}
    def _repr_png_(self): return b"PNG"
    def _repr_mimebundle_(self, include=None, exclude=None): return {"text/x": "more"}
Table()"""
    (result,) = sandbox.run_code(code).results
    assert (result.html, result.json) == ("<table>", {"rows": [1, None]})
    assert base64.b64decode(result.png or "") == b"PNG"
    assert result.extra == {"text/x": "more"}


def test_errors_have_name_value_and_traceback(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("print(1)\nraise KeyError('k')")
    error = execution.error
    assert error is not None and (error.name, error.value) == ("KeyError", "'k'")
    assert error.traceback.rstrip().endswith("KeyError: 'k'")
    assert execution.logs.stderr == [] and execution.logs.stdout == ["1\n"]
    for code, name in (("def", "SyntaxError"), ("import sys; sys.exit(1)", "SystemExit")):
        error = sandbox.run_code(code).error
        assert error is not None and error.name == name
    assert sandbox.run_code("1").text == "1"


def test_environment_variables(make: Make) -> None:
    sandbox = make(envs={"OF_SANDBOX": "1"})
    code = "import os; [os.environ.get(name) for name in ('OF_SANDBOX', 'OF_RUN')]"
    assert sandbox.run_code(code, envs={"OF_RUN": "2"}).text == "['1', '2']"
    assert sandbox.run_code(code).text == "['1', None]"


def test_contexts_are_apart(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("sub")
    home = sandbox.run_code("import os; os.getcwd()").text
    other = sandbox.create_code_context(cwd=f"{home}/sub")
    sandbox.run_code("x = 1", context=other)
    assert sandbox.run_code("x").error is not None
    assert (sandbox.run_code("import os; os.getcwd()", context=other).text or "").endswith("/sub")
    assert {c.id for c in sandbox.list_code_contexts()} > {other.id}
    sandbox.restart_code_context(other)
    execution = sandbox.run_code("x", context=other)
    assert execution.error is not None and execution.error.name == "NameError"
    assert execution.execution_count == 1
    sandbox.remove_code_context(other)
    assert other.id not in {c.id for c in sandbox.list_code_contexts()}
    with pytest.raises(NotFoundException, match="not found"):
        sandbox.run_code("x", context=other)


def test_what_is_impossible_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match="language 'r' is not supported"):
        sandbox.run_code("1", language="r")
    with pytest.raises(SandboxException, match="language 'bash' is not supported"):
        sandbox.create_code_context(language="bash")
    with pytest.raises(SandboxException, match="nowhere"):
        sandbox.create_code_context(cwd="/nowhere")
    assert sandbox.run_code("1", language="Python").text == "1"


def test_a_client_that_leaves_ends_its_run(sandbox: Sandbox) -> None:
    sandbox.run_code("x = 1")
    with pytest.raises(TimeoutException):
        sandbox.run_code("while True: pass", timeout=1)
    assert sandbox.run_code("x", timeout=60).text == "1"  # interrupted, and its names are kept


def test_a_waiting_run_whose_client_leaves_never_begins(sandbox: Sandbox) -> None:
    code = "import os, time\nopen('begun', 'w').close()\n" + (
        "while not os.path.exists('go'): time.sleep(0.01)"
    )
    worker = threading.Thread(target=sandbox.run_code, args=(code,), kwargs={"timeout": 90})
    worker.start()
    deadline = time.monotonic() + 60
    while not sandbox.files.exists("begun"):
        assert time.monotonic() < deadline, "the first run did not begin"
    with pytest.raises(TimeoutException):
        sandbox.run_code("open('wrong', 'w').close()", timeout=2)
    sandbox.files.write("go", "")
    worker.join(90)
    assert sandbox.run_code("import os; os.path.exists('wrong')").text == "False"


def _send_and_leave(sandbox: Sandbox, url: str, path: str, message: object) -> None:
    """Send a request and close, so that the end of the connection comes with the request."""
    address = httpx.URL(url)
    body = json.dumps(message)
    head = {
        "Host": "localhost",
        "Content-Length": str(len(body)),
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49999",
        "E2b-Traffic-Access-Token": sandbox.traffic_access_token or "",
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {head[name]}" for name in head), "", body]
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall("\r\n".join(lines).encode())
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass


def test_a_client_that_leaves_while_the_interpreter_starts_ends_its_run(
    running: Server, sandbox: Sandbox
) -> None:
    for _ in range(5):
        for context in sandbox.list_code_contexts():
            sandbox.restart_code_context(context)
        _send_and_leave(sandbox, running.url, "/execute", {"code": "while True: pass"})
        assert sandbox.run_code("1", timeout=20).text == "1"


def test_a_context_whose_client_left_meanwhile_is_removed(
    running: Server, sandbox: Sandbox
) -> None:
    (default,) = sandbox.list_code_contexts()
    for _ in range(3):
        _send_and_leave(sandbox, running.url, "/contexts", {})
    deadline = time.monotonic() + 30
    while (ids := [context.id for context in sandbox.list_code_contexts()]) != [default.id]:
        assert time.monotonic() < deadline, ids


def test_a_removed_context_starts_no_more_interpreters(sandbox: Sandbox) -> None:
    context = sandbox.create_code_context()
    begun = threading.Event()
    code = "print(1, flush=True)\nwhile True: pass"
    errors: list[str] = []

    def run() -> None:
        execution = sandbox.run_code(
            code, context=context, on_stdout=lambda _: begun.set(), timeout=30
        )
        assert execution.error is not None
        errors.append(execution.error.value)

    workers = [threading.Thread(target=run) for _ in range(3)]  # one runs, the others wait
    for worker in workers:
        worker.start()
    assert begun.wait(60)
    sandbox.remove_code_context(context)
    for worker in workers:
        worker.join(60)
    assert len(errors) == 3 and all("removed" in error for error in errors), errors


def test_an_interpreter_that_ends_says_what_is_lost(sandbox: Sandbox) -> None:
    execution = sandbox.run_code(
        "x = 1\nprint('so far', flush=True)\nimport os; os.kill(os.getpid(), 9)"
    )
    assert execution.logs.stdout == ["so far\n"]
    assert execution.error is not None and execution.error.name == "InterpreterEnded"
    assert "signal 9" in execution.error.value and "names" in execution.error.value
    execution = sandbox.run_code("x")
    assert execution.error is not None and execution.error.name == "NameError"


def test_output_is_limited(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("x = 1\nwhile True: print('x' * 65535)", timeout=90)
    assert execution.error is not None and execution.error.name == "OutputLimitError"
    assert sum(map(len, execution.logs.stdout)) <= 4 << 20
    assert sandbox.run_code("x").text == "1"


def test_damaged_results_are_said_to_be_damaged(sandbox: Sandbox) -> None:
    execution = sandbox.run_code('import os\nos.write(4, b\'{"main": 1, "data": []}\\n\\xff\\n\');')
    assert "".join(execution.logs.stderr).count("is left out: it is damaged") == 2
    assert execution.error is None


def test_results_that_cannot_be_sent_on_are_said_to_be_damaged(
    running: Server, sandbox: Sandbox
) -> None:
    code = """
import os
def write(value): os.write(4, b'{"main": 1, "data": {"application/json": %s}}\\n' % value)
write(b"1e999")
for depth in range(850, 1000): write(b"[" * depth + b"]" * depth)"""
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49999",
        "E2b-Traffic-Access-Token": sandbox.traffic_access_token or "",
    }
    answer = httpx.post(f"{running.url}/execute", json={"code": code}, headers=headers, timeout=60)
    lines = answer.text.splitlines()
    assert json.loads(lines[-1]) == {"type": "end_of_execution"}
    assert "Infinity" not in answer.text
    results = sum(line.startswith('{"type":"result"') for line in lines)
    damaged = answer.text.count("is left out: it is damaged")
    assert damaged >= 1 and damaged + results == 151


def test_a_killed_sandbox_ends_the_request(sandbox: Sandbox) -> None:
    started = threading.Event()

    def kill() -> None:
        started.wait(60)
        sandbox.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    code = "print(1, flush=True)\nwhile True: pass"
    with pytest.raises(TimeoutException, match="killed"):
        sandbox.run_code(code, on_stdout=lambda _: started.set(), timeout=60)
    killer.join(60)


def test_the_token_is_wanted(running: Server, make: Make) -> None:
    sandbox, other = make(), make()
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49999"}

    def ask(method: str, path: str, **tokens: str | None) -> int:
        given = {name.replace("_", "-"): value or "" for name, value in tokens.items()}
        answer = http.request(
            method, f"{running.url}{path}", headers=headers | given, json={"code": "1"}
        )
        return answer.status_code

    for method, path in (("POST", "/execute"), ("GET", "/contexts"), ("POST", "/contexts")):
        assert ask(method, path) == 401
        assert ask(method, path, E2B_Traffic_Access_Token=other.traffic_access_token) == 401
        assert ask(method, path, E2B_Traffic_Access_Token=sandbox.traffic_access_token) == 200
    assert ask("GET", "/health") == 200
    # It opens nothing else of the sandbox.
    headers["E2b-Sandbox-Port"] = "49983"
    traffic = sandbox.traffic_access_token
    assert ask("GET", "/files?path=/etc/passwd", E2B_Traffic_Access_Token=traffic) == 401
    assert ask("GET", "/files?path=/etc/passwd", X_Access_Token=traffic) == 401


def test_the_server_has_a_time_limit() -> None:
    server = start_server("bubblewrap", "--run-timeout-s", "1")
    try:
        sandbox = Sandbox.create(**server.opts)
        error = sandbox.run_code("x = 1\nwhile True: pass").error
        assert error is not None and error.name == "TimeoutError"
        assert "longer than 1 s" in error.value and "names are kept" in error.value
        assert "KeyboardInterrupt" in error.traceback
        assert sandbox.run_code("x").text == "1"
        code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        error = sandbox.run_code(code).error
        assert error is not None and error.name == "TimeoutError"
        assert "killed" in error.value and "names of this context are lost" in error.value
    finally:
        server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_packages_of_a_shared_environment_and_figures() -> None:
    for name in ("matplotlib", "pandas"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: it is in the group `figures`")
    server = start_server("bubblewrap", "--share", sys.prefix)
    try:
        sandbox = Sandbox.create(**server.opts)
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nplt.figure()"
        execution = sandbox.run_code(code, timeout=200)
        assert execution.error is None, execution.error
        printed = "".join(execution.logs.stderr)
        assert "Fontconfig" not in printed and "non-interactive" not in printed
        assert len(execution.results) == 2
        for result in execution.results:
            assert base64.b64decode(result.png or "").startswith(b"\x89PNG")
        code = "import pandas\npandas.DataFrame({'a': [1, 2]})"
        (result,) = sandbox.run_code(code, timeout=200).results
        assert result.data == {"a": [1, 2]}
        assert "<table" in (result.html or "")
    finally:
        server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_streams_are_lines_of_json(running: Server, make: Make) -> None:
    sandbox = make()
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49999",
        "X-Access-Token": sandbox._envd_access_token or "",  # pyright: ignore[reportPrivateUsage]
        "X-API-Key": KEY,
    }
    body = {"code": "print(1); 2", "context_id": None, "language": None, "env_vars": None}
    answer = httpx.post(f"{running.url}/execute", json=body, headers=headers, timeout=60)
    kinds = [json.loads(line)["type"] for line in answer.text.splitlines()]
    assert [kind for kind in kinds if kind != "keepalive"] == [
        "number_of_executions",
        "stdout",
        "result",
        "end_of_execution",
    ]
