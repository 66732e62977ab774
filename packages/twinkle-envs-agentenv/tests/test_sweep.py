"""What a dead trainer leaves, and what must be left alone."""

import subprocess
import sys
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv import _labels as labels
from twinkle_agentic.envs.agentenv import sweep
from twinkle_agentic.envs.errors import SandboxError

LIST = ("GET", "/v2/sandboxes")


@pytest.fixture
def orphans(server: Any) -> Any:
    """Three sandboxes of a trainer that was killed, one of them paused."""
    code = (
        "from twinkle_agentic.envs import AgentEnv\n"
        "import os, signal\n"
        f"make = lambda: AgentEnv(template='base', api_url={server.url!r}, run='dead')\n"
        "envs = [make() for _ in range(3)]\n"
        "for env in envs: env.reset()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -9
    assert len(server.sandboxes) == 3
    ids = list(server.sandboxes)
    server.sandboxes[ids[0]].state = "paused"
    return ids


@pytest.fixture
def stranger(server: Any, make_env: Any) -> Any:
    from e2b import Sandbox

    return Sandbox.create("base", api_url=server.url, sandbox_url=server.url, api_key="k")


def test_orphans_go_paused_ones_too_and_others_stay(
    server: Any, orphans: Any, stranger: Any, make_env: Any
) -> None:
    mine = make_env()
    mine.reset()
    report = sweep(api_url=server.url)
    assert sorted(report.killed) == sorted(orphans)
    assert report.found == 4
    assert report.spared == {mine.sandbox_id: "its trainer runs on this host"}
    assert report.failed == {}
    assert set(server.sandboxes) == {mine.sandbox_id, stranger.sandbox_id}


def test_only_labelled_ones_even_where_the_server_does_not_filter(
    server: Any, orphans: Any, stranger: Any
) -> None:
    server.filters_lists = False
    report = sweep(api_url=server.url, run="dead")
    assert sorted(report.killed) == sorted(orphans)
    assert list(server.sandboxes) == [stranger.sandbox_id]


def test_a_run_is_named(server: Any, orphans: Any, make_env: Any) -> None:
    assert sweep(api_url=server.url, run="another").found == 0
    assert len(sweep(api_url=server.url, run="dead").killed) == 3


def test_young_ones_are_spared(server: Any, orphans: Any) -> None:
    # They say they were started in January 2026.
    assert sweep(api_url=server.url, older_than_s=1e10).killed == []
    assert len(sweep(api_url=server.url, older_than_s=1).killed) == 3


def test_a_trainer_on_another_host_must_be_named(server: Any, orphans: Any) -> None:
    for sandbox in server.sandboxes.values():
        sandbox.body["metadata"]["twinkle-host"] = "elsewhere"
    report = sweep(api_url=server.url)
    assert report.killed == []
    assert set(report.spared.values()) == {
        "its trainer is elsewhere: name it with run or older_than_s"
    }
    assert len(sweep(api_url=server.url, run="dead").killed) == 3


def test_a_trainer_in_a_container_of_the_same_host_name_is_left_alone(
    server: Any, make_env: Any
) -> None:
    env = make_env()
    env.reset()
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no process id namespace can be made here")
    code = (
        "from twinkle_agentic.envs.agentenv import sweep\n"
        f"print(sweep(api_url={server.url!r}).killed)\n"
    )
    done = subprocess.run([*unshare, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    assert env.step("run_command", {"command": "true"}).info.get("error") is None


def test_running_trainers_only_when_told(server: Any, make_env: Any) -> None:
    env = make_env(run="mine")
    env.reset()
    assert sweep(api_url=server.url, run="mine").killed == []
    report = sweep(api_url=server.url, run="mine", include_live=True)
    assert report.killed == [env.sandbox_id]
    assert report.reasons == {
        env.sandbox_id: "its trainer runs on this host, and include_live is set"
    }


def test_each_kill_has_its_true_reason(server: Any, orphans: Any, make_env: Any) -> None:
    mine = make_env()
    mine.reset()
    server.sandboxes[orphans[0]].body["metadata"]["twinkle-host"] = "elsewhere"
    server.fault("DELETE", f"/sandboxes/{orphans[2]}", status=500, body="broken", times=99)
    dry = sweep(api_url=server.url, include_live=True, dry_run=True)
    assert dry.reasons == {
        orphans[0]: "its trainer is elsewhere, and include_live is set",
        orphans[1]: "its trainer is gone",
        orphans[2]: "its trainer is gone",
        mine.sandbox_id: "its trainer runs on this host, and include_live is set",
    }
    done = sweep(api_url=server.url, older_than_s=1)
    assert done.reasons == {
        orphans[0]: "its trainer is elsewhere, and older_than_s names it",
        orphans[1]: "its trainer is gone",
    }


def test_a_dry_run_kills_nothing(server: Any, orphans: Any) -> None:
    assert sorted(sweep(api_url=server.url, dry_run=True).killed) == sorted(orphans)
    assert len(server.sandboxes) == 3


def test_what_cannot_be_killed_is_reported(server: Any, orphans: Any) -> None:
    server.fault("DELETE", f"/sandboxes/{orphans[1]}", status=500, body="broken", times=99)
    report = sweep(api_url=server.url)
    assert len(report.killed) == 2
    assert "broken" in report.failed[orphans[1]]


@pytest.mark.parametrize(("status", "body"), [(401, ""), (503, "no nodes"), (500, "x")])
def test_a_server_that_does_not_list_is_an_error(server: Any, status: Any, body: Any) -> None:
    server.fault(*LIST, status=status, body=body, times=99)
    with pytest.raises(SandboxError, match=f"does not list its sandboxes: {status}"):
        sweep(api_url=server.url, request_timeout=5)


def test_a_process_id_used_again_is_not_the_trainer() -> None:
    mine = labels.process_labels("r")
    assert labels.owner_lives(mine) is True
    assert labels.owner_lives({**mine, "twinkle-process-start": "1"}) is False
    for name in ("twinkle-host", "twinkle-pid-space"):
        assert labels.owner_lives({**mine, name: "elsewhere"}) is None
    assert labels.owner_lives({}) is None
