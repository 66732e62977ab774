# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from e2b import Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import SandboxException, SandboxNotFoundException, SandboxNotRunningException

from .conftest import http

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Server


def eventually(check: Callable[[], Any], timeout_s: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def test_create_info_and_kill(server: Server) -> None:
    sandbox = server.sandbox(metadata={"run": "a"}, timeout=77)
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata["run"] == "a"
    assert info.state == SandboxState.RUNNING
    assert 60 < (info.end_at - info.started_at).total_seconds() <= 78
    assert sandbox.is_running()
    assert sandbox.kill()
    assert not sandbox.kill()
    assert not sandbox.is_running()
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_degraded_isolation_is_in_the_metadata(server: Server) -> None:
    info = server.sandbox().get_info()
    assert info.metadata.get("isolation") == (None if server.mode == "bubblewrap" else "process")
    assert http.get(f"{server.url}/health").json()["isolation"] == server.mode


def test_requests_to_a_dead_sandbox(sandbox: Sandbox) -> None:
    sandbox.kill()
    with pytest.raises(SandboxNotRunningException):
        sandbox.commands.run("true")
    with pytest.raises(SandboxNotRunningException):
        sandbox.files.read("x")


def test_kill_ends_a_command_in_flight(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 100", background=True)
    sandbox.kill()
    with pytest.raises(SandboxNotRunningException):
        handle.wait()


def test_sandboxes_do_not_see_each_other(server: Server) -> None:
    one, two = server.sandbox(), server.sandbox()
    one.files.write("secret", "x")
    assert not two.files.exists("secret")
    if server.mode == "bubblewrap":
        one.commands.run("sleep 100", background=True)
        assert "sleep" not in two.commands.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout


def test_list_filters_and_pages(server: Server) -> None:
    made = [server.sandbox(metadata={"group": "pages & co", "n": str(n)}) for n in range(5)]
    made[0].pause()
    seen: list[str] = []
    pages = 0
    paginator = Sandbox.list(
        query=SandboxQuery(metadata={"group": "pages & co"}), limit=2, **server.opts
    )
    while paginator.has_next:
        page = paginator.next_items()
        assert len(page) <= 2
        seen += [info.sandbox_id for info in page]
        pages += 1
    assert pages == 3
    assert sorted(seen) == sorted(sandbox.sandbox_id for sandbox in made)
    one = Sandbox.list(
        query=SandboxQuery(metadata={"group": "pages & co", "n": "3"}), **server.opts
    ).next_items()
    assert [info.sandbox_id for info in one] == [made[3].sandbox_id]
    paused = Sandbox.list(
        query=SandboxQuery(state=[SandboxState.PAUSED]), **server.opts
    ).next_items()
    assert [info.sandbox_id for info in paused] == [made[0].sandbox_id]


def test_set_timeout_ends_the_sandbox(server: Server) -> None:
    sandbox = server.sandbox()
    sandbox.set_timeout(1)
    eventually(lambda: not sandbox.is_running())
    with pytest.raises(SandboxNotFoundException):
        sandbox.set_timeout(60)


def test_pause_and_connect_keep_processes(sandbox: Sandbox, server: Server) -> None:
    sandbox.files.write("n", "0")
    loop = "while true; do n=$(cat n); echo $((n+1)) > n.new; mv n.new n; sleep 0.02; done"
    sandbox.commands.run(loop, background=True)
    eventually(lambda: int(sandbox.files.read("n") or 0) > 2)
    assert sandbox.pause()
    assert not sandbox.pause()
    assert not sandbox.is_running()
    assert sandbox.get_info().state == SandboxState.PAUSED
    with pytest.raises(SandboxNotRunningException, match="paused"):
        sandbox.commands.run("true")
    again = Sandbox.connect(sandbox.sandbox_id, timeout=60, **server.opts)
    before = int(again.files.read("n") or 0)
    eventually(lambda: int(again.files.read("n") or 0) > before)


def test_auto_resume_on_access(server: Server) -> None:
    sandbox = server.sandbox(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.pause()
    assert sandbox.commands.run("echo back").stdout == "back\n"
    assert sandbox.get_info().state == SandboxState.RUNNING


def test_the_end_of_the_lease_pauses_when_asked(server: Server) -> None:
    sandbox = server.sandbox(timeout=1, lifecycle={"on_timeout": "pause", "auto_resume": True})
    eventually(lambda: sandbox.get_info().state == SandboxState.PAUSED)
    assert sandbox.commands.run("echo again").stdout == "again\n"


def test_connect_never_shortens_the_lease(server: Server) -> None:
    sandbox = server.sandbox(timeout=300)
    end = sandbox.get_info().end_at
    Sandbox.connect(sandbox.sandbox_id, timeout=10, **server.opts)
    assert sandbox.get_info().end_at >= end


def test_refresh_extends_only(server: Server) -> None:
    sandbox = server.sandbox(timeout=60)
    url = f"{server.url}/sandboxes/{sandbox.sandbox_id}"
    end = http.get(url).json()["endAt"]
    assert http.post(f"{url}/refreshes", json={"duration": 10}).status_code == 204
    assert http.get(url).json()["endAt"] == end
    assert http.post(f"{url}/refreshes", json={"duration": 600}).status_code == 204
    assert http.get(url).json()["endAt"] > end


def test_both_families_of_paths(server: Server) -> None:
    made = http.post(f"{server.url}/sandboxes", json={"templateID": "base", "timeout": 60})
    assert made.status_code == 201
    sandbox_id = made.json()["sandboxID"]
    assert "envdAccessToken" not in made.json()
    assert (
        http.post(f"{server.url}/sandboxes/{sandbox_id}/connect", json={"timeout": 60}).status_code
        == 200
    )
    listed = http.get(f"{server.url}/sandboxes").json()
    assert sandbox_id in [entry["sandboxID"] for entry in listed]
    assert http.post(f"{server.url}/sandboxes/{sandbox_id}/pause").status_code == 204
    assert http.post(f"{server.url}/sandboxes/{sandbox_id}/pause").status_code == 409
    assert (
        http.post(f"{server.url}/sandboxes/{sandbox_id}/resume", json={"timeout": 60}).status_code
        == 201
    )
    assert http.delete(f"{server.url}/sandboxes/{sandbox_id}").status_code == 204
    assert http.delete(f"{server.url}/sandboxes/{sandbox_id}").status_code == 404


def test_the_token_is_wanted(server: Server) -> None:
    sandbox = server.sandbox()
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    url = f"{server.url}/process.Process/List"
    assert http.post(url, json={}, headers=headers).status_code == 401
    assert http.get(f"{server.url}/files?path=/etc/passwd", headers=headers).status_code == 401
    assert http.get(f"{server.url}/health", headers=headers).status_code == 204


def test_fork(sandbox: Sandbox) -> None:
    sandbox.files.write("state", "prepared")
    forks = [fork for fork in sandbox.fork(count=3) if isinstance(fork, Sandbox)]
    assert len(forks) == 3
    try:
        assert len({fork.sandbox_id for fork in forks} | {sandbox.sandbox_id}) == 4
        for number, fork in enumerate(forks):
            assert fork.files.read("state") == "prepared"
            fork.files.write("state", str(number))
        assert sandbox.files.read("state") == "prepared"
        assert [fork.files.read("state") for fork in forks] == ["0", "1", "2"]
        assert forks[0].commands.run("cat state").exit_code == 0
    finally:
        for fork in forks:
            fork.kill()


def test_snapshot_list_create_delete(server: Server, sandbox: Sandbox) -> None:
    sandbox.commands.run(
        "mkdir -p d && echo deep > d/f && ln -s d/f link && chmod 711 d && touch -d @1000000000 d/f"
    )
    snapshot = sandbox.create_snapshot()
    assert snapshot.snapshot_id in [
        s.snapshot_id for s in Sandbox.list_snapshots(**server.opts).next_items()
    ]
    copy = server.sandbox(snapshot.snapshot_id)
    assert copy.files.read("link") == "deep\n"
    assert copy.commands.run("stat -c '%a' d; stat -c %Y d/f").stdout.split() == [
        "711",
        "1000000000",
    ]
    assert sandbox.is_running()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id, **server.opts)
    with pytest.raises(SandboxException, match="not found"):
        server.sandbox(snapshot.snapshot_id)


def test_metrics_of_a_sandbox(sandbox: Sandbox) -> None:
    sandbox.commands.run(
        "python3 -c 'import time; x = bytearray(20 << 20); time.sleep(100)'", background=True
    )
    sample = eventually(lambda: [m for m in sandbox.get_metrics() if m.mem_used > 20 << 20])[0]
    assert sample.mem_total == 256 << 20
    sandbox.commands.run("timeout 1 sh -c 'while :; do :; done'; true", timeout=30)
    assert sandbox.get_metrics()[0].cpu_used_pct > 1


def test_unknown_template_is_an_error(server: Server) -> None:
    with pytest.raises(SandboxException, match="template 'nope' not found"):
        server.sandbox("nope")


@pytest.mark.parametrize(
    "message",
    [
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": 10**9},
        {"metadata": {"a": 1}},
        {"envVars": []},
        {"allow_internet_access": True},
        {"templateID": 7},
        {"volumeMounts": [{"name": "x"}]},
        {"network": {"allowOut": ["1.2.3.4"]}},
        {"autoResume": True},
    ],
)
def test_bad_create_requests(server: Server, message: dict[str, Any]) -> None:
    answer = http.post(f"{server.url}/v2/sandboxes", json=message)
    assert answer.status_code == 400
    assert answer.json()["message"]


def test_no_network_is_a_promise_or_an_error(server: Server) -> None:
    request = {"templateID": "base", "timeout": 60, "allow_internet_access": False}
    answer = http.post(f"{server.url}/v2/sandboxes", json=request)
    if server.mode == "process":
        assert answer.status_code == 400
        assert server.sandbox().get_info().allow_internet_access is True
        return
    url = f"{server.url}/sandboxes/{answer.json()['sandboxID']}"
    assert http.get(url).json()["allowInternetAccess"] is False
    assert http.delete(url).status_code == 204


def test_idempotency_key(server: Server) -> None:
    def create(key: str, **message: Any) -> httpx.Response:
        body = {"templateID": "base", "timeout": 60, **message}
        return http.post(f"{server.url}/v2/sandboxes", json=body, headers={"Idempotency-Key": key})

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: create("one"), range(8)))
    assert {answer.status_code for answer in answers} == {201}
    ids = {answer.json()["sandboxID"] for answer in answers}
    assert len(ids) == 1
    assert create("two").json()["sandboxID"] not in ids
    assert create("one", metadata={"other": "request"}).status_code == 422


def test_many_creates_at_once(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        sandboxes = list(pool.map(lambda _: server.sandbox(), range(32)))
        outputs = list(pool.map(lambda s: s.commands.run("echo $$").exit_code, sandboxes))
    assert outputs == [0] * 32


def test_a_host_name_chooses_the_sandbox(start: Callable[..., Server]) -> None:
    server = start("bubblewrap", "--domain", "sandbox.example")
    sandbox = server.sandbox()
    host = f"49983-{sandbox.sandbox_id}.sandbox.example"
    url = f"{server.url}/health"
    assert http.get(url, headers={"Host": host}).status_code == 204
    other = host.replace("49983", "8080")
    assert http.get(url, headers={"Host": other}).status_code == 502
    server.stop()


def test_the_longest_life_holds_against_renewals(start: Callable[..., Server]) -> None:
    server = start("bubblewrap", "--max-lifetime-s", "2")
    sandbox = server.sandbox(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.set_timeout(3600)

    def gone() -> bool:
        try:
            sandbox.set_timeout(3600)
        except SandboxNotFoundException:
            return True
        return False

    eventually(gone)
    server.stop()


def test_prometheus_metrics(server: Server) -> None:
    sandbox = server.sandbox()
    text = http.get(f"{server.url}/metrics").text
    assert 'sandbox_server_sandboxes{state="running"}' in text
    assert "sandbox_server_create_seconds_count" in text
    sandbox.kill()


def test_a_full_server_answers_429(start: Callable[..., Server]) -> None:
    server = start("bubblewrap", "--max-sandboxes", "2")
    one = server.sandbox()
    server.sandbox()
    answer = http.post(f"{server.url}/v2/sandboxes", json={"templateID": "base"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    one.kill()
    assert http.post(f"{server.url}/v2/sandboxes", json={"templateID": "base"}).status_code == 201
    server.stop()


def test_the_key_is_wanted(start: Callable[..., Server]) -> None:
    server = start("bubblewrap", "--api-key", "right-key")
    for headers in ({}, {"X-API-Key": "wrong"}):
        answer = http.get(f"{server.url}/v2/sandboxes", headers=headers)
        assert answer.status_code == 401
        assert "X-API-Key" in answer.json()["message"]
    assert http.get(f"{server.url}/v2/sandboxes", headers={"X-API-Key": "right-key"}).json() == []
    assert http.get(f"{server.url}/health").status_code == 200
    server.stop()


def options(server: Server, key: str) -> dict[str, Any]:
    return server.opts | {"api_key": key}


def test_a_browsers_page_is_refused_without_a_key(server: Server) -> None:
    if server.mode == "process":
        pytest.skip("a server without isolation has a key; see test_the_key_is_wanted")
    url = f"{server.url}/v2/sandboxes"
    port = server.url.rpartition(":")[2]
    for headers in ({"Host": f"evil.example:{port}"}, {"Origin": "https://evil.example"}):
        answer = http.post(url, content=b"{}", headers=headers)
        assert answer.status_code == 403, headers
        assert "not loopback" in answer.json()["message"]
    assert http.get(url, headers={"Host": "localhost", "Origin": server.url}).status_code == 200


def test_two_servers_in_one_process(start: Callable[..., Server]) -> None:
    servers = [start("bubblewrap", "--api-key", key) for key in ("key-one", "key-two")]
    sandboxes = [
        Sandbox.create("base", timeout=60, **options(server, key))
        for server, key in zip(servers, ("key-one", "key-two"), strict=True)
    ]
    for number, sandbox in enumerate(sandboxes):
        sandbox.files.write("n", str(number))
    assert [sandbox.files.read("n") for sandbox in sandboxes] == ["0", "1"]
    for sandbox, server in zip(sandboxes, servers, strict=True):
        assert sandbox.kill()
        server.stop()
