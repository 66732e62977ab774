"""Both servers say the same, in one line, where they cannot have their address."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

LIMIT_S = 90
_PR_CAPBSET_DROP = 24
_CAP_NET_BIND_SERVICE = 10

SERVERS = {
    "twinkle-openenv-server": ["--insecure"],
    "twinkle-sandbox-server": ["--api-key", "key"],
}


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = _has_ipv6()


def command(server: str, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name(server)), *SERVERS[server], *options]


def refused(server: str, *options: str, **kwargs: Any) -> str:
    """The line that the server ends with, without its name."""
    ended = subprocess.run(
        command(server, *options),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        **kwargs,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    name, _, rest = line.partition(": ")
    assert name == server
    return rest


def drop_the_privilege() -> None:
    """For root: what is started next may not bind to the low ports."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_NET_BIND_SERVICE, 0, 0, 0)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        pytest.param("::1", marks=pytest.mark.skipif(not IPV6, reason="no IPv6 here")),
    ],
)
@pytest.mark.parametrize("server", SERVERS)
def test_a_port_in_use(server: str, host: str) -> None:
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    with socket.socket(family) as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        assert refused(server, "--host", host, "--port", str(port)) == (
            f"cannot listen on {shown}:{port}: the port is in use: stop what listens there, or "
            "give another --port (0 takes a free one)"
        )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_before_any_worker_is_started(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("twinkle-openenv-server", "--port", port, "--workers", workers)
    assert "the port is in use" in said


@pytest.mark.parametrize("server", SERVERS)
def test_a_host_that_is_not_known(server: str) -> None:
    said = refused(server, "--host", "no-such-host.invalid", "--port", "8123")
    assert said.startswith("cannot listen on no-such-host.invalid:8123: the host is not known (")
    assert said.endswith("give an address of this machine as --host, such as 127.0.0.1")


@pytest.mark.parametrize("server", SERVERS)
def test_an_address_of_another_machine(server: str) -> None:
    assert refused(server, "--host", "192.0.2.1", "--port", "0") == (
        "cannot listen on 192.0.2.1:0: this machine has no such address: give one of its own as "
        "--host, such as 127.0.0.1"
    )


@pytest.mark.parametrize("server", SERVERS)
def test_a_port_that_needs_privileges(server: str) -> None:
    first_free = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first_free <= 1:
        pytest.skip("this machine has no port that needs privileges")
    drop = drop_the_privilege if os.geteuid() == 0 else None
    assert refused(server, "--port", "1", preexec_fn=drop) == (
        "cannot listen on 127.0.0.1:1: the port needs privileges: give a --port from 1024 on, or "
        "the process CAP_NET_BIND_SERVICE"
    )


@pytest.mark.parametrize("server", SERVERS)
def test_all_addresses_of_both_kinds_are_served_on_one_port(server: str) -> None:
    process = subprocess.Popen(
        command(server, "--host", "", "--port", "0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "http://" in line)
        port = line.partition("http://")[2].split()[0].rpartition(":")[2]
        for address in ("127.0.0.1", *(["[::1]"] if IPV6 else [])):
            url = f"http://{address}:{port}/health"
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
                assert answer.status == 200
    finally:
        process.terminate()
        process.communicate(timeout=30)
