"""What happens when a worker's process, its node, or the driver dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twinkle_agentic.envs.errors import PoolError, WorkerLostError
from twinkle_agentic.envs.openenv.pool import EnvPool

LAB = "pool_test_envs:Lab"


NOTHING: list[dict[str, Any]] = [{}]  # arguments of one step


def pid_of(pool: EnvPool, slot: int) -> int:
    return int(pool.step(slot, "pid").observation)


def test_killed_worker_loses_its_slots_alone_and_comes_back(cluster: Any, gate: Any) -> None:
    with EnvPool(20, env_factory=LAB, num_workers=2) as pool:
        pool.reset_batch(range(20))
        pool.step_batch(range(20), ["add"] * 20, NOTHING * 20)
        killed, other = pid_of(pool, 0), pid_of(pool, 10)
        with ThreadPoolExecutor(10) as threads:
            in_flight = [
                threads.submit(pool.step, slot, "wait", {"gate": gate.path}) for slot in range(8)
            ]
            gate.await_waiting(8)
            os.kill(killed, signal.SIGKILL)
            results = [call.result(60) for call in in_flight]
        for result in results:
            assert result.done
            assert result.info["error_kind"] == "env"
            assert result.info["retryable"] is True
            assert result.info["error"]
        idle = pool.step(9, "add")  # it was not in flight: the new process has no such episode
        assert idle.done
        assert idle.info["retryable"] is True
        assert "lost" in idle.info["error"]
        assert pool.step(0, "add").done
        assert pool.stats()[0].lost == 10
        revived = pool.reset_batch(range(10))
        assert all(result.error is None for result in revived)
        assert pid_of(pool, 0) not in (killed, other)
        assert pool.step(3, "add").observation == "step 1"
        assert pool.stats()[0].restarts == 1
        assert pool.stats()[0].lost == 0
        # The others never noticed.
        assert pid_of(pool, 10) == other
        assert pool.step(19, "add").observation == "step 2"
        assert pool.stats()[1].restarts == 0


def test_worker_killed_in_a_batch_and_under_min_results(cluster: Any, gate: Any) -> None:
    with EnvPool(4, env_factory=LAB, num_workers=2) as pool:
        pool.reset_batch(range(4))
        victim = pid_of(pool, 0)
        first = pool.step_batch(
            range(4),
            ["wait", "wait", "add", "add"],
            [{"gate": gate.path}] * 2 + NOTHING * 2,
            min_results=2,
        )
        assert [r is None for r in first] == [True, True, False, False]
        gate.await_waiting(2)
        os.kill(victim, signal.SIGKILL)
        late = pool.collect()
        assert {slot: r.info["error_kind"] for slot, r in late.items()} == {0: "env", 1: "env"}
        pool.reset_batch(range(4))
        victim = pid_of(pool, 0)
        with ThreadPoolExecutor(1) as threads:
            batch = threads.submit(
                pool.step_batch,
                [3, 0, 2, 1],
                ["add", "wait", "add", "wait"],
                [{}, {"gate": gate.path}, {}, {"gate": gate.path}],
            )
            gate.await_waiting(4)  # two of the first worker's and two of this one's
            os.kill(victim, signal.SIGKILL)
            results = batch.result(60)
        assert [r.error is None for r in results] == [True, False, True, False]
        assert all(r.info["retryable"] for r in results if r.error)


def test_reset_in_flight_when_the_worker_dies_is_started_again(cluster: Any, gate: Any) -> None:
    with EnvPool(1, env_factory=LAB, num_workers=1) as pool:
        pool.reset(0)
        victim = pid_of(pool, 0)
        with ThreadPoolExecutor(1) as threads:
            reset = threads.submit(pool.reset, 0, gate=gate.path)
            gate.await_waiting(1)
            os.kill(victim, signal.SIGKILL)
            gate.await_waiting(2)
            for fifo in gate.waiting():
                if not fifo.name.startswith(f"{victim}-"):
                    with fifo.open("w"):
                        pass
            assert "gate" in reset.result(60).observation
        assert pool.step(0, "add").observation == "step 1"


async def test_async_calls_see_the_loss_as_well(cluster: Any, gate: Any) -> None:
    async with EnvPool(2, env_factory=LAB, num_workers=1) as pool:
        (first, second) = pool.get_adapters(2)
        await asyncio.gather(first.areset(), second.areset())
        victim = int((await first.astep("pid")).observation)
        await first.astep("add", {"reward": 0.5})
        step = asyncio.create_task(first.astep("wait", {"gate": gate.path}))
        await asyncio.to_thread(gate.await_waiting, 1)
        os.kill(victim, signal.SIGKILL)
        result = await step
        assert result.done
        assert (result.info["error_kind"], result.info["retryable"]) == ("env", True)
        assert result.info["episode_reward"] == 0.5
        assert (await first.areset()).observation == "ready []"
        assert (await second.areset()).observation == "ready []"


def test_environment_that_ends_its_process_is_a_lost_worker(cluster: Any) -> None:
    with EnvPool(2, env_factory=LAB, num_workers=1) as pool:
        pool.reset_batch([0, 1])
        result = pool.step(0, "exit")
        assert result.done
        assert result.info["error_kind"] == "env"
        assert pool.reset(1).observation == "ready []"


def test_worker_stuck_in_native_code_is_replaced(cluster: Any) -> None:
    with EnvPool(2, env_factory=LAB, num_workers=1, step_timeout_s=0.5) as pool:
        pool.reset_batch([0, 1])
        stuck = pid_of(pool, 0)
        result = pool.step(0, "hold_interpreter")
        assert result.done
        assert result.info["error_kind"] == "timeout"
        assert result.info["retryable"] is True
        assert pool.reset(0).observation == "ready []"
        assert pid_of(pool, 0) != stuck


def test_worker_that_is_gone_for_good_says_so(cluster: Any) -> None:
    options = {"max_restarts": 0}
    with EnvPool(2, env_factory=LAB, num_workers=1, worker_options=options) as pool:
        pool.reset(0)
        assert pool.step(0, "exit").info["error_kind"] == "env"
        with pytest.raises(WorkerLostError, match="worker 0 is dead") as caught:
            pool.reset(0)
        assert caught.value.retryable is False
        assert pool.stats()[0].alive is False


@pytest.mark.slow
def test_lost_node_is_the_same_as_its_workers_lost(cluster: Any, gate: Any) -> None:
    seat = {f"pool_seat_{uuid.uuid4().hex}": 1}  # of this test's nodes and no other
    doomed = cluster.add_node(num_cpus=1, resources=seat, object_store_memory=80 * 2**20)
    spare = None
    steady = cluster.add_node(num_cpus=1, resources=seat, object_store_memory=80 * 2**20)
    try:
        options = {"resources": seat}  # one worker on each node
        with EnvPool(4, env_factory=LAB, num_workers=2, worker_options=options) as pool:
            pool.reset_batch(range(4))
            pids = [pid_of(pool, slot) for slot in range(4)]
            raylet = next(
                p.process.pid
                for kind, ps in doomed.all_processes.items()
                if kind == "raylet"
                for p in ps
            )
            lost = [slot for slot in range(4) if raylet in _ancestors(pids[slot])]
            kept = [slot for slot in range(4) if slot not in lost]
            assert len(lost) == len(kept) == 2
            with ThreadPoolExecutor(1) as threads:
                call = threads.submit(pool.step, lost[0], "wait", {"gate": gate.path})
                gate.await_waiting(1)
                cluster.remove_node(doomed, allow_graceful=False)
                doomed = None
                result = call.result(60)
            assert result.done
            assert (result.info["error_kind"], result.info["retryable"]) == ("env", True)
            assert pid_of(pool, kept[0]) == pids[kept[0]]
            spare = cluster.add_node(num_cpus=1, resources=seat, object_store_memory=80 * 2**20)
            assert all(r.error is None for r in pool.reset_batch(lost))
            assert pid_of(pool, lost[1]) not in pids
    finally:
        for node in (doomed, steady, spare):
            if node is not None:
                cluster.remove_node(node)


def _ancestors(pid: int) -> list[int]:
    """Return the parent of a process, its parent, and so on: Ray may put a shell in between."""
    found: list[int] = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


DRIVER = """
import sys
import ray
from twinkle_agentic.envs.openenv.pool import EnvPool
ray_options = {"address": sys.argv[1], "log_to_driver": False}
if sys.argv[1] == "local":
    ray_options |= {"include_dashboard": False, "num_cpus": 2}
pool = EnvPool(4, env_factory="pool_test_envs:Lab", num_workers=2, ray_options=ray_options)
pool.reset_batch(range(4))
print(*{pool.step(slot, "pid").observation for slot in range(4)}, flush=True)
pool.step(0, "wait", {"gate": sys.argv[2]})
"""


@pytest.mark.parametrize(
    ("how", "where"),
    [
        (signal.SIGINT, "joined"),
        (signal.SIGKILL, "joined"),
        pytest.param(signal.SIGKILL, "local", marks=pytest.mark.slow),
    ],
)
def test_dead_driver_leaves_no_worker_behind(
    cluster: Any,
    gate: Any,
    how: signal.Signals,
    where: str,
    eventually: Callable[..., None],
    process_lives: Callable[[int], bool],
) -> None:
    address = cluster.address if where == "joined" else "local"
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), address, gate.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None and driver.stderr is not None
    try:
        line = driver.stdout.readline()
        assert line.strip(), driver.stderr.read()
        pids = [int(pid) for pid in line.split()]
        assert len(pids) == 2
        gate.await_waiting(1)
        raylets = {_ancestors(pid)[0] for pid in pids}
        os.kill(driver.pid, how)
        driver.wait(60)
        assert driver.returncode != 0
        eventually(lambda: not any(map(process_lives, pids)), "the workers have ended")
        if where == "local":
            eventually(lambda: not any(map(process_lives, raylets)), "its Ray has ended")
    finally:
        if driver.poll() is None:
            driver.kill()
        driver.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("home", ["empty", "read-only"])
def test_pool_starts_and_ends_ray_by_itself_without_settings(home: str, tmp_path: Path) -> None:
    uv = shutil.which("uv")
    assert uv, "uv is not installed: pip install uv"
    script = textwrap.dedent("""
    import os
    from twinkle_agentic.envs.openenv.pool import EnvPool
    with EnvPool(2, env_factory="pool_test_envs:Lab", num_workers=2, num_cpus=3,
                 ray_options=dict(address="local", num_cpus=6, include_dashboard=False)) as pool:
        pool.reset_batch([0, 1])
        print(pool.step(1, "echo", {"text": "hello"}).observation)
    import ray
    print(ray.is_initialized())
    """)
    # A home without the token that Ray keeps there.
    home = str(tmp_path) if home == "empty" else "/proc/nowhere"
    done = subprocess.run(
        # As from the shell of somebody who starts everything by `uv run`, which Ray looks for.
        [uv, "run", "--no-project", "env", f"HOME={home}", sys.executable, "-c", script],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.split() == ["hello", "False"], done.stderr
    assert done.returncode == 0


@pytest.mark.slow
def test_pool_says_so_when_ray_was_shut_down_under_it() -> None:
    script = """
    import ray
    from twinkle_agentic.envs.errors import PoolError
    from twinkle_agentic.envs.openenv.pool import EnvPool
    ray.init(num_cpus=2, include_dashboard=False, address="local", log_to_driver=False)
    pool = EnvPool(2, env_factory="pool_test_envs:Lab", num_workers=1)
    pool.reset(0)
    ray.shutdown()
    try:
        pool.step(0, "add")
    except PoolError as error:
        print(error)
    print(pool.lease().step("add").info["error"])
    pool.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=110
    )
    assert done.stdout.startswith("Ray was shut down under the pool"), done.stderr


@pytest.mark.slow
def test_ray_that_a_pool_started_lives_as_long_as_any_pool_uses_it() -> None:
    script = """
    import ray
    from twinkle_agentic.envs.openenv.pool import EnvPool
    options = dict(address="local", num_cpus=2, include_dashboard=False)
    first = EnvPool(1, env_factory="pool_test_envs:Lab", num_workers=1, ray_options=options)
    second = EnvPool(1, env_factory="pool_test_envs:Lab", num_workers=1)
    first.close()
    print(second.reset(0).observation, ray.is_initialized())
    second.close()
    print(ray.is_initialized())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=110
    )
    assert done.stdout.splitlines() == ["ready [] True", "False"], done.stderr


def test_workers_with_another_twinkle_agentic_are_told_by_its_file(
    cluster: Any, tmp_path: Path
) -> None:
    other = tmp_path / "twinkle_agentic"
    other.mkdir()
    (other / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    options = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}, "max_restarts": 0}
    with pytest.raises(PoolError, match="has no EnvPool worker") as raised:
        EnvPool(1, env_factory="pool_test_envs:Lab", num_workers=1, worker_options=options)
    assert str(other / "__init__.py") in str(raised.value)
    assert "twinkle-envs-openenv" in str(raised.value)
