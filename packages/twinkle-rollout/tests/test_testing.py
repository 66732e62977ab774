"""Child servers: ready or an error with their last words, and gone afterwards on every path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from twinkle_agentic.rollout.testing import ServerError, ServerProcess

_ENDPOINT = "twinkle_agentic.rollout.cli.scripted_endpoint"


def endpoint() -> ServerProcess:
    return ServerProcess(
        "endpoint", lambda port: [sys.executable, "-m", _ENDPOINT, "--port", str(port)]
    )


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_server_answers_inside_and_is_gone_outside() -> None:
    with endpoint() as server:
        server.wait_ready(30)
        pid = server.pid
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=5) as response:
            assert response.status == 200
    assert pid is not None
    assert gone(pid)


def test_a_server_that_dies_is_reported_with_its_last_words() -> None:
    code = "import sys; print('no such weights'); sys.exit(3)"
    server = ServerProcess("model", lambda _: [sys.executable, "-c", code])
    with server, pytest.raises(ServerError, match=r"exit code 3:\nno such weights"):
        server.wait_ready(30)


def test_a_server_that_never_answers_is_reported_within_the_limit() -> None:
    code = "import signal; signal.pause()"
    with (
        ServerProcess("mute", lambda _: [sys.executable, "-c", code]) as server,
        pytest.raises(ServerError, match="did not answer"),
    ):
        server.wait_ready(0.2)


def test_a_server_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "sys.stdout.write('up'); sys.stdout.flush(); signal.pause()"
    )
    server = ServerProcess("stubborn", lambda _: [sys.executable, "-c", code], stop_timeout_s=0.2)
    with server:
        pid = server.pid
    assert pid is not None
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_parent_takes_its_server_along() -> None:
    code = (
        "import sys, signal; from twinkle_agentic.rollout.testing import ServerProcess\n"
        f"c = [sys.executable, '-m', {_ENDPOINT!r}, '--port']\n"
        "s = ServerProcess('x', lambda port: [*c, str(port)])\n"
        "s.__enter__(); s.wait_ready(30); print(s.pid, flush=True); signal.pause()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    import select

    ended, _, _ = select.select([watch], [], [], 10)
    os.close(watch)
    assert ended, "the server outlived its killed parent"
