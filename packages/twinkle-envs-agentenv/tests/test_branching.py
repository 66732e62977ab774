"""Forks and snapshots."""

# The fixtures of conftest.py have no type that a test could import.
# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from typing import Any

import pytest

from twinkle_agentic.envs.errors import SandboxError, SandboxLostError, SandboxUnavailableError

FORK = ("POST", "/sandboxes/.*/fork")


@pytest.fixture
def env(make_env: Any) -> Any:
    made = make_env(setup_commands=["echo prepared"])
    made.reset()
    made.write_file("/state", b"shared")
    return made


def test_forks_start_as_copies_and_go_their_own_ways(server: Any, env: Any) -> None:
    twins = env.fork(3)
    assert len({env.sandbox_id, *(twin.sandbox_id for twin in twins)}) == 4
    twins[0].write_file("/state", b"changed")
    seen = [one.read_file("/state") for one in (env, *twins)]
    assert seen == [b"shared", b"changed", b"shared", b"shared"]
    for twin in twins:
        twin.close()
    assert list(server.sandboxes) == [env.sandbox_id]


def test_the_first_reset_of_a_fork_keeps_it_and_a_later_one_starts_anew(
    server: Any, env: Any
) -> None:
    (twin,) = env.fork()
    forked = twin.sandbox_id
    assert twin.reset().observation == "prepared"
    assert twin.sandbox_id == forked
    assert twin.read_file("/state") == b"shared"
    twin.reset()
    assert twin.sandbox_id != forked
    assert twin.step("read_file", {"path": "/state"}).error
    twin.close()


def test_tools_are_taken_over(env: Any) -> None:
    info = {"type": "function", "function": {"name": "t"}}
    env.register_tool(info, lambda e, a: e.sandbox_id)
    (twin,) = env.fork()
    assert twin.step("t", {}).observation == twin.sandbox_id
    twin.register_tool({"type": "function", "function": {"name": "u"}}, lambda e, a: "")
    assert len(twin.tools()) == len(env.tools()) + 1
    twin.close()


def test_many_forks_take_several_requests(server: Any, env: Any) -> None:
    twins = env.fork(20)
    assert [body["count"] for body in server.bodies(*FORK)] == [16, 4]
    for twin in twins:
        twin.close()


def test_all_or_none(server: Any, env: Any) -> None:
    server.fault(*FORK, status=500, body="broken", times=9)
    with pytest.raises(SandboxUnavailableError, match="broken"):
        env.fork(2)
    assert list(server.sandboxes) == [env.sandbox_id]


def test_room_is_waited_for(server: Any, env: Any) -> None:
    server.fault(*FORK, status=503, body="busy", times=1)
    (twin,) = env.fork()
    twin.close()


def test_a_dead_fork_is_not_handed_over(server: Any, env: Any) -> None:
    (twin,) = env.fork()
    server.kill_sandbox(twin.sandbox_id)
    with pytest.raises(SandboxLostError, match="is lost"):
        twin.reset()
    twin.reset()
    twin.close()


def test_a_fork_has_failures_of_its_own(server: Any, env: Any) -> None:
    start = ("POST", "/process.Process/Start")
    server.fault(*start, status=502, body="connection refused", times=2)
    for _ in range(2):
        assert env.step("run_command", {"command": "true"}).error
    (twin,) = env.fork()
    assert twin.exec("true").exit_code == 0
    server.fault(*start, status=502, body="connection refused", times=1)
    assert not twin.step("run_command", {"command": "true"}).done
    assert twin.step("run_command", {"command": "echo on"}).observation == "on"
    twin.close()


def test_forking_nothing(make_env: Any, env: Any) -> None:
    with pytest.raises(SandboxError, match="call reset"):
        make_env().fork()
    with pytest.raises(ValueError, match="n >= 1"):
        env.fork(0)


def test_snapshots(server: Any, env: Any) -> None:
    snapshot_id = env.snapshot("my-state")
    assert snapshot_id == "snap-1"
    assert env.delete_snapshot(snapshot_id) is True
    server.fault("DELETE", "/templates/.*", status=404, body="gone")
    assert env.delete_snapshot(snapshot_id) is False
    server.fault("POST", ".*/snapshots", status=501, body="no snapshots here")
    with pytest.raises(SandboxError, match="no snapshots here"):
        env.snapshot()
