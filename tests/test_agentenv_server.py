"""`AgentEnv` against the local sandbox server: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from e2b import Sandbox, SandboxQuery

from twinkle_agentic.envs import AgentEnv, SandboxPool, StepResult
from twinkle_agentic.envs.agentenv import SandboxRefusedError, sweep
from twinkle_agentic.envs.agentenv._handle import live_handles
from twinkle_agentic.envs.errors import SandboxUnavailableError
from twinkle_agentic.protocol.base import API
from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.testing import ServerProcess

pytestmark = pytest.mark.integration

EnvMaker = Callable[..., AgentEnv]


def ids(url: str, key: str = "any", **labels: str) -> list[str]:
    pages = Sandbox.list(
        query=SandboxQuery(metadata=labels) if labels else None, api_url=url, api_key=key
    )
    found: list[str] = []
    while pages.has_next:
        found += [info.sandbox_id for info in pages.next_items()]
    return found


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def make_env(sandbox_server: ServerProcess) -> Iterator[EnvMaker]:
    made: list[AgentEnv] = []

    def make(**arguments: Any) -> AgentEnv:
        given: dict[str, Any] = {"template": "base", "api_url": sandbox_server.url}
        made.append(AgentEnv(**{**given, **arguments}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def server_process(*options: str) -> ServerProcess:
    return ServerProcess(
        "sandbox server",
        lambda port: [sys.executable, "-m", "sandbox_server", "--port", str(port), *options],
    )


def test_two_servers_with_two_keys_in_one_process() -> None:
    with server_process("--api-key", "key-1") as one, server_process("--api-key", "key-2") as two:
        one.wait_ready(60)
        two.wait_ready(60)
        envs = [
            AgentEnv(template="base", api_url=one.url, api_key="key-1"),
            AgentEnv(template="base", api_url=two.url, api_key="key-2"),
        ]
        for env in envs:
            env.reset()
        for env, server, key in zip(envs, (one, two), ("key-1", "key-2"), strict=True):
            assert env.step("run_command", {"command": "echo here"}).observation == "here"
            assert ids(server.url, key) == [env.sandbox_id]
        wrong = AgentEnv(template="base", api_url=one.url, api_key="key-2")
        with pytest.raises(SandboxRefusedError, match="E2B_API_KEY"):
            wrong.reset()
        for env in envs:
            env.close()
        assert ids(one.url, "key-1") == ids(two.url, "key-2") == []


def test_a_timed_out_command_ends_with_everything_it_started(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    run = env.exec("echo begun; (sleep 61 & setsid sleep 62 & wait); echo never", timeout_s=1)
    assert (run.timed_out, run.exit_code, run.stdout) == (True, None, "begun\n")
    left = env.exec("for d in /proc/[0-9]*; do tr '\\0' ' ' < $d/cmdline; echo; done")
    assert "sleep 6" not in left.stdout
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_endless_output_is_bounded_and_the_next_command_works(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    run = env.exec("yes", timeout_s=2)
    assert run.exit_code != 0
    assert len(run.stdout) < 2**20 + 1_000
    assert run.cut_chars > 0
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_what_killed_a_command_is_said(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    flood = env.step("run_command", {"command": "yes | head -c 200000000"})
    assert flood.observation.endswith(
        "[exit code -1: killed: more output than the server allows for one command]"
    )
    dead = env.step("run_command", {"command": "echo a; kill -9 $$"})
    assert dead.observation == "a\n[exit code -1: signal: kill]"
    assert env.step("run_command", {"command": "exit 3"}).observation == "[exit code 3]"


def test_bytes_that_are_no_text_and_long_text(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    shown = env.step("run_command", {"command": "printf '\\377\\376'; head -c 200000 /dev/urandom"})
    shown.observation.encode()
    assert "characters cut" in shown.observation
    assert env.exec("python3 -c \"print('你好🎉' * 40000)\"").stdout == "你好🎉" * 40_000 + "\n"


def test_a_killed_sandbox_is_lost_until_reset(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    assert env.sandbox is not None
    env.sandbox.kill()
    for tool, arguments in (
        ("run_command", {"command": "true"}),
        ("read_file", {"path": "/etc/passwd"}),
    ):
        result = env.step(tool, arguments)
        assert (result.done, result.info["error_kind"]) == (True, "sandbox_lost")
    env.reset()
    assert env.step("run_command", {"command": "echo back"}).observation == "back"


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("read_file", {"path": "/etc/passwd"}), ("run_command", {"command": "true"})],
)
def test_each_tool_notices_a_dead_sandbox_first(
    make_env: EnvMaker, tool: str, arguments: dict[str, str]
) -> None:
    env = make_env()
    env.reset()
    assert env.sandbox is not None
    env.sandbox.kill()
    assert env.step(tool, arguments).info["error_kind"] == "sandbox_lost"


@pytest.mark.parametrize("closed", [False, True])
def test_an_episode_ends_whose_sandbox_goes_under_a_command(
    make_env: EnvMaker, closed: bool
) -> None:
    env = make_env()
    env.reset()
    sandbox = env.sandbox
    assert sandbox is not None
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(env.step, "run_command", {"command": "echo begun; sleep 60"})
        until(lambda: any("sleep 60" in " ".join(p.args) for p in sandbox.commands.list()))
        if closed:
            env.close()
        else:
            sandbox.kill()
        result = running.result(30)
    assert (result.done, result.info["error_kind"]) == (True, "sandbox_lost")


def test_a_paused_sandbox_resumes_on_access(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    env.write_file("note", "before")
    assert env.sandbox is not None
    env.sandbox.pause()
    assert env.sandbox.get_info().state.value == "paused"
    assert env.step("read_file", {"path": "note"}).observation == "before"
    assert env.sandbox.get_info().state.value == "running"


def test_an_idle_sandbox_pauses_and_comes_back(make_env: EnvMaker) -> None:
    env = make_env(sandbox_timeout=1, command_timeout=1, refresh_timeout=False)
    env.reset()
    assert env.sandbox is not None
    sandbox = env.sandbox
    until(lambda: sandbox.get_info().state.value == "paused")
    assert env.step("run_command", {"command": "echo back"}).observation == "back"


def test_an_idle_sandbox_is_killed_on_request(make_env: EnvMaker) -> None:
    env = make_env(sandbox_timeout=1, on_timeout="kill", refresh_timeout=False)
    env.reset()
    until(lambda: ids(env.spec.connection.address, **{"twinkle-run": env.spec.run}) == [])
    result = env.step("run_command", {"command": "true"})
    assert (result.done, result.info["error_kind"]) == (True, "sandbox_lost")


def test_the_lease_is_longer_than_the_command_and_never_shortened(make_env: EnvMaker) -> None:
    env = make_env(sandbox_timeout=5, command_timeout=200)
    env.reset()
    sandbox = env.sandbox
    assert sandbox is not None
    env.step("run_command", {"command": "true"})
    until_then = (sandbox.get_info().end_at.timestamp()) - time.time()
    assert until_then > 200
    sandbox.set_timeout(3_000)
    env.step("run_command", {"command": "true"})
    assert sandbox.get_info().end_at.timestamp() - time.time() > 2_900


def test_forks_share_a_prepared_state(make_env: EnvMaker) -> None:
    env = make_env(setup_commands=["echo prepared > ~/state; echo ready"])
    env.reset()
    group = env.fork(4)
    try:
        for number, twin in enumerate(group):
            assert twin.reset().observation == "ready"
            twin.write_file("mine", str(number))
        seen = [twin.exec("cat ~/state ~/mine").stdout for twin in group]
        assert seen == [f"prepared\n{number}" for number in range(4)]
        labels = {"twinkle-run": env.spec.run, "twinkle-created-by": "twinkle-envs-agentenv"}
        found = ids(env.spec.connection.address, **labels)
        assert {twin.sandbox_id for twin in group} <= set(found), "a sweep finds forks too"
    finally:
        for twin in group:
            twin.close()


def test_a_snapshot_is_a_template(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    env.write_file("state", "kept")
    snapshot_id = env.snapshot()
    try:
        other = make_env(template=snapshot_id)
        other.reset()
        assert other.read_file("state") == b"kept"
        other.close()
    finally:
        assert env.delete_snapshot(snapshot_id)
    assert not env.delete_snapshot(snapshot_id)


def test_warm_sandboxes(make_env: EnvMaker) -> None:
    with SandboxPool(3) as pool:
        envs = [make_env(pool=pool, setup_commands=["echo set up"]) for _ in range(3)]
        assert pool.prefill(envs[0]) == 3
        assert [env.reset().observation for env in envs] == ["set up"] * 3
        assert pool.stats().hits == 3
        for env in envs:
            assert env.step("run_command", {"command": "echo ok"}).observation == "ok"


def test_a_template_that_is_not_there(make_env: EnvMaker) -> None:
    with pytest.raises(SandboxRefusedError, match="'no-such-template'") as caught:
        make_env(template="no-such-template").reset()
    assert not caught.value.retryable


def test_a_full_server_is_waited_for(make_env: EnvMaker) -> None:
    with server_process("--max-sandboxes", "2") as server:
        server.wait_ready(60)
        envs = [make_env(api_url=server.url, capacity_timeout_s=20) for _ in range(3)]
        envs[0].reset()
        envs[1].reset()
        refused = make_env(api_url=server.url, capacity_timeout_s=0)
        with pytest.raises(SandboxUnavailableError, match="capacity_timeout_s"):
            refused.reset()
        with ThreadPoolExecutor(1) as threads:
            third = threads.submit(envs[2].reset)
            envs[0].close()
            third.result(30)
        assert envs[2].step("run_command", {"command": "echo in"}).observation == "in"
        for env in envs:
            env.close()


def test_a_server_that_is_killed_loses_its_sandboxes_and_nothing_hangs() -> None:
    with server_process() as server:
        server.wait_ready(60)
        env = AgentEnv(template="base", api_url=server.url, capacity_timeout_s=0)
        env.reset()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        result = env.step("run_command", {"command": "true"})
        assert (result.done, result.info["error_kind"]) == (True, "sandbox_lost")
        with pytest.raises(SandboxUnavailableError):
            env.reset()
        for handle in live_handles():  # the exit of this process would try the dead server again
            if handle.spec.connection.address == server.url:
                handle.forget()


def test_many_at_once_leave_nothing(make_env: EnvMaker) -> None:
    envs = [make_env(run="many") for _ in range(64)]

    def episode(env: AgentEnv) -> str:
        env.reset()
        seen = env.step("run_command", {"command": "echo $((6 * 7))"}).observation
        env.close()
        return seen

    with ThreadPoolExecutor(64) as threads:
        assert list(threads.map(episode, envs)) == ["42"] * 64
    assert ids(envs[0].spec.connection.address, **{"twinkle-run": "many"}) == []


TRAINER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from twinkle_agentic.envs import AgentEnv

url, run = sys.argv[1:]

def episode(number):
    env = AgentEnv(template='base', api_url=url, run=run)
    env.reset()
    print(number, flush=True)
    while True:
        env.step('run_command', {'command': 'sleep 1'})

with ThreadPoolExecutor(32) as threads:
    list(threads.map(episode, range(32)))
"""


@pytest.mark.parametrize("how", ["function", "command line"])
def test_kill_9_in_the_middle_of_32_episodes_then_sweep(
    sandbox_server: ServerProcess, make_env: EnvMaker, how: str
) -> None:
    url, run = sandbox_server.url, f"killed-{how.split()[0]}"
    mine = make_env(run=run)  # of a trainer that lives: a sweep leaves it alone
    mine.reset()
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, url, run], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        for _ in range(32):
            assert trainer.stdout.readline()
        trainer.kill()
    orphans = set(ids(url, **{"twinkle-run": run})) - {mine.sandbox_id}
    assert len(orphans) == 32
    paused = next(iter(orphans))
    Sandbox.connect(paused, api_url=url, sandbox_url=url, api_key="any").pause()
    if how == "function":
        report = sweep(api_url=url, run=run)
        assert set(report.killed) == orphans
        assert report.failed == {}
    else:
        done = subprocess.run(
            [sys.executable, "-m", "twinkle_agentic.rollout.cli", "sweep", "--api-url", url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 failed" in " ".join(done.stdout.split())
    assert ids(url, **{"twinkle-run": run}) == [mine.sandbox_id]
    assert mine.step("run_command", {"command": "echo alive"}).observation == "alive"


def test_descriptors_stay_flat_over_200_rounds(make_env: EnvMaker) -> None:
    env = make_env()

    def rounds(n: int) -> int:
        for _ in range(n):
            env.reset()
            env.step("run_command", {"command": "true"})
        return len(os.listdir("/proc/self/fd"))

    before = rounds(20)
    assert rounds(180) <= before + 3


class TwoCommands(API):
    """Not a model: it runs two commands and stops."""

    def __call__(self, trajectory: Any, sampling_params: Any, **kwargs: Any) -> Any:
        turn = sum(message["role"] == "assistant" for message in trajectory["messages"])
        if turn == 2:
            return {"role": "assistant", "content": "done"}
        function = {"name": "run_command", "arguments": '{"command": "echo hi"}'}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class Fragile(AgentEnv):
    """Loses its sandbox before its second command, where the task says so."""

    def reset(self, trajectory: Any = None) -> StepResult:
        self.doomed = trajectory["user_data"]["doomed"]
        self.commands = 0
        return super().reset(trajectory)

    def run_command(self, arguments: Any) -> str:
        self.commands += 1
        if self.doomed and self.commands == 2 and self.sandbox is not None:
            self.sandbox.kill()
        return super().run_command(arguments)

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(trajectories)


def test_a_lost_sandbox_has_no_reward_and_touches_no_neighbour(
    sandbox_server: ServerProcess,
) -> None:
    rollout = APIMultiTurnRollout(
        api=TwoCommands(),
        env_factory=lambda trajectory: Fragile(
            template="base", api_url=sandbox_server.url, run="fragile"
        ),
    )
    tasks: list[Any] = [
        {
            "messages": [{"role": "user", "content": "go"}],
            "user_data": {"doomed": number == 2, "episode_id": number},
        }
        for number in range(6)
    ]
    done: list[Any] = list(rollout(tasks))
    doomed = done.pop(2)
    assert [(t["stop_reason"], t["reward"]) for t in done] == [("stop", 1.0)] * 5
    assert (doomed["stop_reason"], doomed["reward"]) == ("env_error", None)
    assert (doomed["error_kind"], doomed["retryable"]) == ("sandbox_lost", True)
    assert ids(sandbox_server.url, **{"twinkle-run": "fragile"}) == []


class Graded(AgentEnv):
    """Rewards the second command, in `step`."""

    def step(self, tool_name: str, arguments: dict[str, Any] | None = None) -> StepResult:
        result = super().step(tool_name, arguments)
        self.taken = getattr(self, "taken", 0) + 1
        result.reward = 1.0 if self.taken == 2 else 0.0
        return result


class Evaluated(AgentEnv):
    """Rewards the whole."""

    def evaluate(self, trajectories: Any, **kwargs: Any) -> list[float]:
        return [0.5] * len(trajectories)


@pytest.mark.parametrize(
    ("kind", "reward", "steps", "missing"),
    [
        (AgentEnv, 0.0, [0.0, 0.0], [0, 1]),
        (Evaluated, 0.5, [0.0, 0.0], [0, 1]),
        (Graded, 1.0, [0.0, 1.0], []),
    ],
)
def test_a_reward_that_nobody_gives_is_seen_and_one_that_somebody_gives_is_counted(
    sandbox_server: ServerProcess,
    kind: type[AgentEnv],
    reward: float,
    steps: list[float],
    missing: list[int],
) -> None:
    rollout = APIMultiTurnRollout(
        api=TwoCommands(),
        env_factory=lambda trajectory: kind(template="base", api_url=sandbox_server.url),
    )
    (done,) = rollout([{"messages": [{"role": "user", "content": "go"}]}])
    assert (done["reward"], done["step_rewards"]) == (reward, steps)
    assert done["reward_missing_steps"] == missing


def test_code_keeps_its_names_and_shows_its_results(make_env: EnvMaker) -> None:
    env = make_env(code_interpreter=True, command_timeout=60)
    env.reset()
    assert "'run_code'" in str(env.tools())
    assert env.step("run_code", {"code": "x = 6"}).observation == ""
    result = env.step(
        "run_code", {"code": "import sys\nprint(1)\nprint(2, file=sys.stderr)\nx * 7"}
    )
    assert result.observation == "1\n42\n[stderr]\n2"
    assert result.info["reward_missing"] and result.error is None and not result.done
    code = "class P:\n    def _repr_png_(self): return b'PNG'\ndisplay(P())\nx"
    result = env.step("run_code", {"code": code})
    assert result.observation == "[image 1]\n6" and result.info["images"] == [b"PNG"]
    result = env.step("run_code", {"code": "print('so far')\n1 / 0"})
    assert result.observation.startswith("so far\nTraceback")
    assert result.observation.endswith("ZeroDivisionError: division by zero")
    assert result.info["code_error"] == "ZeroDivisionError" and result.error is None
    assert env.step("run_code", {"code": 3}).info["error_kind"] == "tool"
    assert env.step("run_command", {"command": "echo on"}).observation == "on"


def test_code_that_takes_too_long_is_interrupted(make_env: EnvMaker) -> None:
    env = make_env(code_interpreter=True, command_timeout=3)
    env.reset()
    env.step("run_code", {"code": "x = 1"})
    result = env.step("run_code", {"code": "print('begun', flush=True)\nwhile True: pass"})
    assert result.observation.startswith("begun\n[interrupted: no end within 3 s")
    assert result.info["timed_out"] is True and not result.done
    assert env.run_code("x").observation == "1"


def test_code_in_a_lost_sandbox_ends_the_episode(make_env: EnvMaker) -> None:
    env = make_env(code_interpreter=True)
    env.reset()
    assert env.sandbox is not None
    env.sandbox.kill()
    result = env.step("run_code", {"code": "1"})
    assert result.done and result.info["error_kind"] == "sandbox_lost"


def test_run_code_is_offered_only_where_it_was_asked_for(make_env: EnvMaker) -> None:
    env = make_env()
    env.reset()
    result = env.step("run_code", {"code": "1"})
    assert result.info["error_kind"] == "tool" and "unknown tool" in result.observation
