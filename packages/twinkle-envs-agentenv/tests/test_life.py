"""Every sandbox ends, whatever way the trainer takes."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from twinkle_agentic.envs.agentenv._handle import kill_all, live_handles

DELETE = ("DELETE", "/sandboxes/.*")


def until(condition: Any, timeout_s: Any = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        threading.Event().wait(0.01)


def client(server: Any, code: Any, **popen: Any) -> Any:
    """Start a trainer of its own; `env` is an AgentEnv in it."""
    prelude = (
        "import os, sys, threading, time\n"
        "from twinkle_agentic.envs import AgentEnv\n"
        f"make = lambda **more: AgentEnv(template='base', api_url={server.url!r}, **more)\n"
        "env = make()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def test_reset_and_close_kill(server: Any, make_env: Any) -> None:
    env = make_env()
    env.reset()
    first = env.sandbox_id
    env.reset()
    assert server.killed == [first]
    env.close()
    assert server.sandboxes == {}
    assert live_handles() == []


def test_a_context_manager_kills_after_an_exception(server: Any, make_env: Any) -> None:
    with pytest.raises(KeyError), make_env() as env:
        env.reset()
        raise KeyError
    assert server.sandboxes == {}


def test_a_kill_that_fails_is_tried_again_at_exit(server: Any, make_env: Any) -> None:
    env = make_env()
    env.reset()
    server.fault(*DELETE, status=500, body="broken", times=1)
    env.close()
    assert len(server.sandboxes) == 1
    assert len(live_handles()) == 1
    assert kill_all() == []
    assert server.sandboxes == {}
    assert live_handles() == []


def test_kill_all_tells_what_it_could_not_kill(server: Any, make_env: Any) -> None:
    env = make_env()
    env.reset()
    sandbox_id = env.sandbox_id
    server.fault(*DELETE, status=500, body="broken", times=1)
    assert kill_all() == [sandbox_id]


def test_a_garbage_env_lets_go_of_its_sandbox(server: Any, make_env: Any) -> None:
    from twinkle_agentic.envs.agentenv import AgentEnv

    env = AgentEnv(template="base", api_url=server.url)
    env.reset()
    del env
    gc.collect()
    until(lambda: server.sandboxes == {})


def test_interpreter_exit_kills_all(server: Any) -> None:
    trainer = client(
        server,
        "envs = [make() for _ in range(5)]\n"
        "for one in envs: one.reset()\n"
        "print('ready', flush=True)\n",
    )
    out, err = trainer.communicate(timeout=60)
    assert (trainer.returncode, out, err) == (0, "ready\n", "")
    assert len(server.killed) == 5
    assert server.sandboxes == {}


def test_threads_in_the_middle_of_commands_do_not_outlive_the_interpreter(server: Any) -> None:
    trainer = client(
        server,
        "def work():\n"
        "    one = make(); one.reset()\n"
        "    while True: one.step('run_command', {'command': 'sleep 60'})\n"
        "for _ in range(6): threading.Thread(target=work, daemon=True).start()\n"
        "sys.stdin.read()\n"
        "sys.exit(3)\n",
        stdin=subprocess.PIPE,
    )
    until(lambda: server.count("POST", "/process.Process/Start") == 6, 60)
    _, err = trainer.communicate(timeout=60)
    assert (trainer.returncode, err) == (3, "")
    assert server.sandboxes == {}


def test_an_uncaught_exception_kills_all(server: Any) -> None:
    trainer = client(server, "env.reset()\nraise SystemExit(3)")
    trainer.communicate(timeout=60)
    assert trainer.returncode == 3
    assert server.sandboxes == {}


def test_ctrl_c_during_a_command_kills(server: Any) -> None:
    trainer = client(
        server,
        "env.reset()\n"
        "import asyncio\n"
        "async def main():\n"
        "    await env.astep('run_command', {'command': 'echo begun; sleep 60'})\n"
        "asyncio.run(main())\n",
    )
    until(lambda: server.count("POST", "/process.Process/Start") == 1, 60)
    trainer.send_signal(signal.SIGINT)
    trainer.communicate(timeout=30)
    assert trainer.returncode == -signal.SIGINT
    assert server.sandboxes == {}


def test_ctrl_c_ends_the_wait_for_a_synchronous_command(server: Any) -> None:
    trainer = client(
        server,
        "env.reset()\n"
        "try:\n"
        "    env.step('run_command', {'command': 'echo begun; sleep 60'})\n"
        "except KeyboardInterrupt:\n"
        "    env.close(); print('closed', flush=True)\n",
    )
    until(lambda: server.count("POST", "/process.Process/Start") == 1, 60)
    trainer.send_signal(signal.SIGINT)
    out, _ = trainer.communicate(timeout=20)
    assert (trainer.returncode, out) == (0, "closed\n")
    assert server.sandboxes == {}


@pytest.mark.parametrize("how", ["env.reset()", "import asyncio; asyncio.run(env.areset())"])
def test_ctrl_c_during_a_creation_that_succeeds_later(server: Any, how: Any) -> None:
    server.create_delay_s = 2.0
    trainer = client(server, how + "\n")
    until(lambda: server.count("POST", "/v2/sandboxes") == 1, 60)
    trainer.send_signal(signal.SIGINT)
    trainer.communicate(timeout=30)
    assert trainer.returncode == -signal.SIGINT
    assert server.creating == 0
    assert server.sandboxes == {}


def test_ctrl_c_during_setup(server: Any) -> None:
    trainer = client(server, "make(setup_commands=['sleep 60']).reset()\n")
    until(lambda: server.count("POST", "/process.Process/Start") == 1, 60)
    trainer.send_signal(signal.SIGINT)
    trainer.communicate(timeout=30)
    assert trainer.returncode == -signal.SIGINT
    assert server.sandboxes == {}


def test_nothing_is_created_once_the_interpreter_exits(server: Any) -> None:
    server.fault("POST", "/v2/sandboxes", status=503, body="busy", times=99)
    trainer = client(
        server,
        "threading.Thread(target=make(capacity_timeout_s=60).reset, daemon=True).start()\n"
        "time.sleep(1.5)\n",
    )
    trainer.communicate(timeout=30)
    assert trainer.returncode == 0
    assert server.sandboxes == {}


def test_ctrl_c_during_creation_leaves_nothing(server: Any) -> None:
    server.create_delay_s = 1.0
    trainer = client(server, "env.reset()\n")
    until(lambda: server.count("POST", "/v2/sandboxes") == 1, 60)
    trainer.send_signal(signal.SIGINT)
    trainer.communicate(timeout=30)
    assert trainer.returncode == -signal.SIGINT
    until(lambda: server.creating == 0)
    assert server.sandboxes == {}


def test_a_forked_child_does_not_kill_its_parent_s_sandboxes(server: Any) -> None:
    trainer = client(
        server,
        "env.reset()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    env.close(); sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(env.step('run_command', {'command': 'echo alive'}).observation, flush=True)\n",
    )
    out, err = trainer.communicate(timeout=60)
    assert out == "alive\n", err
    assert server.sandboxes == {}


def test_a_forked_child_is_refused_and_does_not_hang(server: Any) -> None:
    trainer = client(
        server,
        "env.reset()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for act in (make().reset, lambda: env.exec('true'), env.fork):\n"
        "        try: act()\n"
        "        except Exception as e: print(type(e).__name__, \"'spawn'\" in str(e))\n"
        "    print(env.step('run_command', {'command': 'true'}).done, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n",
    )
    out, err = trainer.communicate(timeout=60)
    assert out.splitlines() == ["SandboxRefusedError True"] * 3 + ["True"], err
    assert server.sandboxes == {}


def test_descriptors_stay_flat(server: Any, make_env: Any) -> Any:
    env = make_env()

    def rounds(n: Any) -> Any:
        for _ in range(n):
            env.reset()
            env.step("run_command", {"command": "true"})
        return len(os.listdir("/proc/self/fd"))

    before = rounds(20)
    threads = threading.active_count()
    after = rounds(180)
    assert after <= before + 3
    assert threading.active_count() <= threads + 3
    assert len(server.sandboxes) == 1
