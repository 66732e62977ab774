"""What a hostile program tries fails inside its own sandbox; its neighbours go on."""

# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest
from e2b import CommandExitException, NotEnoughSpaceException, Sandbox, TimeoutException
from e2b.exceptions import InvalidArgumentException, SandboxException

from .conftest import http

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Server


@pytest.fixture
def neighbour(isolated: Server) -> Iterator[Sandbox]:
    """Another sandbox; whatever the test did, it and the server still work."""
    sandbox = isolated.sandbox()
    sandbox.files.write("mine", "intact")
    sandbox.commands.run("sleep 1000", background=True)
    yield sandbox
    assert sandbox.files.read("mine") == "intact"
    assert sandbox.commands.run("pgrep -c sleep", timeout=20).stdout == "1\n"
    fresh = isolated.sandbox()
    assert fresh.commands.run("echo fine", timeout=20).stdout == "fine\n"
    assert http.get(f"{isolated.url}/health", timeout=10).status_code == 200


@pytest.fixture
def attacker(isolated: Server, neighbour: Sandbox) -> Sandbox:
    return isolated.sandbox()


def works(sandbox: Sandbox) -> bool:
    return sandbox.commands.run("echo works", timeout=30).stdout == "works\n"


def outcome(sandbox: Sandbox, command: str, timeout: float = 30) -> str:
    """Run a command that may fail; return all that it said."""
    try:
        result = sandbox.commands.run(command, timeout=timeout)
    except CommandExitException as error:
        return f"{error.stdout}{error.stderr}[{error.exit_code}] {error.error}"
    return f"{result.stdout}{result.stderr}[0]"


def test_links_lead_to_the_sandboxs_own_files(attacker: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    for path in (tmp_path, *tmp_path.parents[:-1]):
        if path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o055)
    attacker.commands.run(
        f"ln -s {secret} one; ln -s {tmp_path} two; ln -s / root; ln -s /etc/passwd pw"
    )
    for path in ("one", "two/secret", f"root{secret}", str(secret), f"../../../../..{secret}"):
        with pytest.raises(SandboxException):
            attacker.files.read(path)
        assert not attacker.files.exists(f"{path}/x")
    assert "user:x:1000" in attacker.files.read("pw")
    with pytest.raises(SandboxException):
        attacker.files.list("two")
    with pytest.raises(SandboxException):
        attacker.files.write("one", "overwritten")
    assert secret.read_text() == "of the host"


def test_a_link_swapped_while_it_is_used(attacker: Sandbox) -> None:
    attacker.commands.run(
        "mkdir -p d; echo mine > d/passwd; while true; do mv d e; ln -s /etc d; rm d; mv e d; done",
        background=True,
    )
    for _ in range(50):
        try:
            text = attacker.files.read("d/passwd")
        except SandboxException:
            continue
        # Its own /etc at the worst: the names of the host are not in it.
        assert text in ("mine\n",) or "user:x:1000" in text


def test_proc_of_the_server_is_out_of_reach(isolated: Server, attacker: Sandbox) -> None:
    pid = isolated.process.pid
    seen = outcome(attacker, "ls /proc | grep -c '^[0-9]'")
    assert int(seen.split("[")[0]) < 10
    assert "[0]" not in outcome(attacker, f"cat /proc/{pid}/environ")
    for name in ("environ", "maps", "fd/3", "root/etc/passwd", "mem"):
        assert "[0]" not in outcome(attacker, f"cat /proc/1/{name}")
    with pytest.raises(SandboxException):
        attacker.files.read("/proc/1/root/etc/shadow")


def test_the_hosts_files_are_not_there(attacker: Sandbox) -> None:
    for path in (
        "/etc/shadow",
        "/var/lib/dpkg/status",
        "/sys/kernel",
        "/boot",
        "/dev/vda",
        "/dev/kvm",
        "/dev/mem",
    ):
        assert not attacker.files.exists(path)
    assert "[0]" not in outcome(attacker, "echo x > /usr/bin/evil")
    assert "[0]" not in outcome(attacker, "mknod disk b 8 0")


def test_no_privileges(attacker: Sandbox) -> None:
    status = attacker.commands.run("cat /proc/self/status").stdout
    for line in (
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ):
        assert line in status
    for command in (
        "unshare -Ur true",
        "unshare -m true",
        "mount -t tmpfs x /mnt",
        "chroot / true",
        "su -c true",
        "hostname evil",
    ):
        for user in ("user", "root"):
            with pytest.raises(CommandExitException):
                attacker.commands.run(command, user=user, timeout=20)


def test_fork_bomb(attacker: Sandbox) -> None:
    with pytest.raises((CommandExitException, TimeoutException)):
        attacker.commands.run("bomb() { bomb | bomb & }; bomb; sleep 2; exit 1", timeout=5)
    # A new process may be refused while the bomb still burns: kill it, as an operator would.
    deadline = time.monotonic() + 30
    while True:
        try:
            attacker.commands.run("kill -9 -1", timeout=5)
        except (CommandExitException, TimeoutException):
            pass
        except SandboxException:
            assert time.monotonic() < deadline
        try:
            if works(attacker):
                break
        except (SandboxException, CommandExitException):
            assert time.monotonic() < deadline
        time.sleep(0.2)


def test_python_fork_bomb_meets_the_limit(attacker: Sandbox) -> None:
    program = (
        "import os, time\n"
        "n = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(30); os._exit(0)\n"
        "        n += 1\n"
        "except OSError as error:\n"
        "    print(n, error.errno, flush=True)\n"
        "os.kill(0, 9)\n"
    )
    attacker.files.write("bomb.py", program)
    said = outcome(attacker, "python3 bomb.py")
    count, errno = said.split("[")[0].split()
    assert int(count) <= 32
    assert errno == "11"
    assert works(attacker)


def test_memory_bomb_of_one_process(attacker: Sandbox) -> None:
    said = outcome(attacker, "python3 -c 'x = bytearray(200 << 20); print(len(x))'")
    assert "MemoryError" in said
    assert works(attacker)


def test_memory_bomb_of_many_processes(attacker: Sandbox) -> None:
    hog = "import time; x = bytearray(b'x') * (40 << 20); time.sleep(20); print('survived')"
    attacker.files.write("hog.py", hog)
    said = outcome(
        attacker, "for i in 1 2 3 4 5 6; do python3 hog.py & done; wait; exit 5", timeout=60
    )
    assert said.count("survived") <= 2
    assert works(attacker)


def test_shared_memory_bomb(attacker: Sandbox) -> None:
    said = outcome(attacker, "head -c 200M /dev/zero > /dev/shm/x")
    assert "No space left" in said
    attacker.commands.run("rm -f /dev/shm/x")
    size = 300 << 20
    program = f"import mmap\nm = mmap.mmap(-1, {size})\nfor i in range(0, {size}, 4096): m[i] = 1\n"
    attacker.files.write("shared.py", program + "print('survived')")
    said = outcome(attacker, "python3 shared.py")
    assert "survived" not in said
    assert works(attacker)


def test_disk_filler(attacker: Sandbox) -> None:
    said = outcome(attacker, "head -c 100M /dev/zero > big; ls -s big; rm big")
    assert "No space left" in said
    said = outcome(
        attacker,
        "i=0; while head -c 1M /dev/zero > p$i; do i=$((i+1)); done 2>&1; echo wrote $i; rm p*",
    )
    assert 8 <= int(said.rpartition("wrote ")[2].split("[")[0]) <= 16
    said = outcome(
        attacker, "mkdir many; cd many; seq 1 100000 | xargs touch; cd ..; rm -rf many", timeout=60
    )
    assert "No space left" in said
    assert works(attacker)


def test_an_upload_that_cannot_fit(attacker: Sandbox) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    with pytest.raises(Exception, match="space"):
        attacker.files.write("big", endless())
    with pytest.raises(NotEnoughSpaceException):
        attacker.files.write("big", b"x" * (40 << 20))
    attacker.files.remove("big")
    assert works(attacker)


def test_one_gigabyte_of_output(attacker: Sandbox) -> None:
    got = 0

    def count(text: str) -> None:
        nonlocal got
        got += len(text)

    with pytest.raises(CommandExitException) as caught:
        attacker.commands.run(
            "head -c 1000000000 /dev/zero | tr '\\0' y", on_stdout=count, timeout=60
        )
    assert "output" in str(caught.value.error)
    assert 7_000_000 < got <= 8 << 20
    assert works(attacker)


def test_output_that_nobody_reads(isolated: Server, attacker: Sandbox) -> None:
    handle = attacker.commands.run("yes", background=True)
    handle.disconnect()
    assert works(attacker)


def test_a_reader_that_stops_does_not_stop_others(isolated: Server, attacker: Sandbox) -> None:
    host, _, port = isolated.url.removeprefix("http://").partition(":")
    body = b'{"process":{"cmd":"/bin/bash","args":["-c","yes"]},"stdin":false}'
    envelope = b"\0" + len(body).to_bytes(4, "big") + body
    token = attacker.connection_config.sandbox_headers["X-Access-Token"]
    with socket.create_connection((host, int(port))) as stalled:
        stalled.sendall(
            f"POST /process.Process/Start HTTP/1.1\r\nHost: {host}\r\n"
            f"E2b-Sandbox-Id: {attacker.sandbox_id}\r\n"
            f"X-Access-Token: {token}\r\nContent-Type: application/connect+json\r\n"
            f"Content-Length: {len(envelope)}\r\n\r\n".encode()
            + envelope
        )
        assert stalled.recv(15) == b"HTTP/1.1 200 OK"
        for _ in range(5):
            assert works(attacker)


def test_killing_the_supervisor(attacker: Sandbox) -> None:
    outcome(attacker, "kill -9 1; kill -TERM 1; kill -STOP 1; kill -SEGV 1")
    assert works(attacker)
    assert "[0]" not in outcome(attacker, "echo x > /proc/1/mem")
    with pytest.raises((CommandExitException, SandboxException)):
        attacker.commands.run("kill -9 -1; sleep 5; exit 1", timeout=10)
    assert works(attacker)


def test_signals_do_not_reach_others(isolated: Server, attacker: Sandbox) -> None:
    outcome(
        attacker,
        f"kill -9 {isolated.process.pid}; for p in $(seq 2 400); do kill -9 $p; done; true",
        timeout=20,
    )
    assert isolated.process.poll() is None
    assert works(attacker)


def test_no_network(isolated: Server, attacker: Sandbox) -> None:
    port = isolated.url.rpartition(":")[2]
    program = (
        "import socket, sys\n"
        "for host, port in (('127.0.0.1', int(sys.argv[1])), ('10.0.0.1', 80), ('1.1.1.1', 53)):\n"
        "    try:\n"
        "        socket.create_connection((host, port), 2); print('connected', host)\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(server.getsockname(), 2); print('own loopback works')\n"
    )
    attacker.files.write("net.py", program)
    said = outcome(attacker, f"python3 net.py {port}")
    assert "connected" not in said
    assert "own loopback works" in said


def test_broken_requests_do_not_hurt(isolated: Server, attacker: Sandbox) -> None:
    token = attacker.connection_config.sandbox_headers["X-Access-Token"]
    headers = {"E2b-Sandbox-Id": attacker.sandbox_id, "X-Access-Token": token}
    rpc = f"{isolated.url}/filesystem.Filesystem/Stat"
    for content in (
        b"{",
        b"[]",
        b'{"path": 5}',
        b'{"path": "a\\u0000b"}',
        b'{"path": "' + b"x" * 10000 + b'"}',
    ):
        answer = http.post(rpc, content=content, headers=headers)
        assert answer.status_code in (400, 404), (content[:20], answer.text)
    start = f"{isolated.url}/process.Process/Start"
    stream = headers | {"Content-Type": "application/connect+json"}
    for content in (b"", b"\0\0\0\0\2{}", b"\1\0\0\0\2{}", b"\0\xff\xff\xff\xff", b"\0\0\0\0\5{}"):
        answer = http.post(start, content=content, headers=stream)
        assert b'"error"' in answer.content, content
    with pytest.raises(InvalidArgumentException):
        attacker.files.read("a\0b")
    assert works(attacker)


def processes_of(server_pid: int) -> list[int]:
    """Return the server's process and all that came from it."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [server_pid], [server_pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("mode", ["bubblewrap", "process"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_server_leaves_no_process(
    start: Callable[..., Server], mode: str, number: int
) -> None:
    server = start(mode)
    for _ in range(8):
        sandbox = server.sandbox()
        sandbox.commands.run(
            "sleep 1000 & setsid sleep 1001 & nohup sleep 1002 & wait", background=True
        )
        sandbox.commands.run("trap '' TERM HUP; while true; do sleep 1; done", background=True)
    pids = processes_of(server.process.pid)
    assert len(pids) > 8 * 5
    server.stop(number)
    deadline = time.monotonic() + 15
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, subprocess.run(
            ["ps", "-fp", ",".join(map(str, left))], capture_output=True, text=True
        ).stdout
        time.sleep(0.05)
    server.made.clear()


def test_many_attackers_at_once(isolated: Server, neighbour: Sandbox) -> None:
    attacks = [
        "bomb() { bomb | bomb & }; bomb; sleep 3",
        "python3 -c 'x = [bytearray(30 << 20) for _ in range(9)]'",
        "cat /dev/zero > fill; sleep 3",
        "yes",
        "kill -9 1; kill -9 -1; sleep 3",
    ]
    sandboxes = [isolated.sandbox() for _ in attacks]

    def attack(sandbox: Sandbox, command: str) -> None:
        try:
            outcome(sandbox, command, timeout=5)
        except SandboxException:
            return

    threads = [
        threading.Thread(target=attack, args=pair) for pair in zip(sandboxes, attacks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert neighbour.commands.run("echo calm", timeout=30).stdout == "calm\n"
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for sandbox in sandboxes:
        assert sandbox.kill()
