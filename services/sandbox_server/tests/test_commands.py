# The SDK leaves some of its types open.
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from e2b import CommandExitException, NotFoundException, Sandbox, TimeoutException
from e2b.exceptions import InvalidArgumentException, SandboxException

if TYPE_CHECKING:
    from conftest import Server


def test_output_and_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_non_zero_exit_raises_with_output(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("echo before; exit 7")
    assert (caught.value.exit_code, caught.value.stdout) == (7, "before\n")


def test_death_by_signal_is_minus_one(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("kill -SEGV $$")
    assert caught.value.exit_code == -1
    assert "signal" in str(caught.value.error)


def test_environment_of_sandbox_and_command(server: Server) -> None:
    sandbox = server.sandbox(envs={"A": "sandbox", "B": "sandbox"})
    result = sandbox.commands.run('echo "$A $B $HOME $USER"; env | wc -l', envs={"B": "command"})
    first, count = result.stdout.splitlines()
    assert first.startswith("sandbox command ")
    assert first.endswith(" user")
    assert int(count) < 20


def test_nothing_of_the_servers_environment(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("cat /proc/self/environ | tr '\\0' '\\n'")
    assert "PYTHONPATH" not in result.stdout


def test_cwd(sandbox: Sandbox) -> None:
    sandbox.files.make_dir("deep/er")
    assert sandbox.commands.run("pwd", cwd="deep/er").stdout.strip().endswith("/deep/er")
    assert sandbox.commands.run("pwd").stdout.strip().endswith("/home/user")


def test_missing_cwd_is_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="nowhere"):
        sandbox.commands.run("pwd", cwd="/nowhere")


def test_users(server: Server, sandbox: Sandbox) -> None:
    assert sandbox.commands.run("echo $USER $HOME", user="user").stdout.startswith("user ")
    root = sandbox.commands.run("echo $USER $(basename $HOME)", user="root").stdout.split()
    assert root == ["root", "root"]
    if server.mode == "bubblewrap":
        assert sandbox.commands.run("whoami; id -u").stdout.split() == ["user", "1000"]
        assert sandbox.commands.run("whoami; id -u", user="root").stdout.split() == ["root", "0"]
    with pytest.raises(SandboxException, match="mallory"):
        sandbox.commands.run("true", user="mallory")


def test_stdin(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat; echo done", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.send_stdin(handle.pid, "two\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\ndone\n"


def test_without_stdin_a_reader_sees_the_end(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat; echo done", timeout=10).stdout == "done\n"


def test_output_is_streamed(sandbox: Sandbox) -> None:
    first = threading.Event()
    seen: list[str] = []

    def on_stdout(text: str) -> None:
        seen.append(text)
        first.set()

    handle = sandbox.commands.run("echo early; read line; echo $line", background=True, stdin=True)
    thread = threading.Thread(target=lambda: handle.wait(on_stdout=on_stdout))
    thread.start()
    assert first.wait(10)
    sandbox.commands.send_stdin(handle.pid, "late\n")
    thread.join(10)
    assert "".join(seen) == "early\nlate\n"


def test_background_list_kill_and_connect(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("echo up; sleep 100", background=True)
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert listed[handle.pid].cmd == "/bin/bash"
    again = sandbox.commands.connect(handle.pid)
    assert sandbox.commands.kill(handle.pid)
    with pytest.raises(CommandExitException):
        again.wait()
    assert not sandbox.commands.kill(handle.pid)
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(handle.pid)


def test_disconnect_does_not_kill(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 0.5; echo lived > proof; sleep 100", background=True)
    handle.disconnect()
    deadline = time.monotonic() + 20
    while not sandbox.files.exists("proof"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]


def test_timeout_kills_the_group_and_keeps_what_was_printed(sandbox: Sandbox) -> None:
    printed: list[str] = []
    with pytest.raises(TimeoutException):
        sandbox.commands.run(
            "echo $$; sleep 300 & echo $!; wait", timeout=1, on_stdout=printed.append
        )
    pids = "".join(printed).split()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while (
        "alive"
        in sandbox.commands.run(
            f"for p in {' '.join(pids)}; do kill -0 $p 2>/dev/null && echo alive; done; true"
        ).stdout
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_background_grandchild_holds_the_command_until_the_timeout(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 300 &", timeout=1)


def test_a_daemon_without_the_output_does_not_hold_it(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("sleep 300 > /dev/null 2>&1 & echo started", timeout=20)
    assert result.stdout == "started\n"


def test_one_megabyte_of_output(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("head -c 1000000 /dev/zero | tr '\\0' x")
    assert result.stdout == "x" * 1_000_000


def test_utf8_and_broken_bytes(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("printf '你好 🙂'").stdout == "你好 🙂"
    assert sandbox.commands.run("printf 'a\\377b'").stdout == "a�b"


def test_pty(sandbox: Sandbox) -> None:
    from e2b.sandbox_sync.commands.pty import PtySize

    data = bytearray()
    handle = sandbox.pty.create(PtySize(rows=30, cols=100), timeout=30)
    sandbox.pty.send_stdin(handle.pid, b"stty size; tty; exit 3\n")
    with pytest.raises(CommandExitException) as caught:
        handle.wait(on_pty=lambda piece: data.extend(piece))
    assert caught.value.exit_code == 3
    assert b"30 100" in data
    assert b"/dev/pts/" in data


def test_pty_resize(sandbox: Sandbox) -> None:
    from e2b.sandbox_sync.commands.pty import PtySize

    data = bytearray()
    handle = sandbox.pty.create(PtySize(rows=30, cols=100), timeout=30)
    sandbox.pty.resize(handle.pid, PtySize(rows=11, cols=22))
    sandbox.pty.send_stdin(handle.pid, b"stty size; exit 0\n")
    handle.wait(on_pty=lambda piece: data.extend(piece))
    assert b"11 22" in data


def test_unknown_program_is_an_error_and_the_sandbox_goes_on(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as caught:
        sandbox.commands.run("no-such-program-xyz")
    assert caught.value.exit_code == 127
    assert sandbox.commands.run("echo on").stdout == "on\n"


def test_python_is_there(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("python3 -c 'print(6 * 7)'", timeout=30).stdout == "42\n"
