"""`EnvPool` next to bare Ray actors and to the pool of twinkle-kit: slot steps per second.

    python benchmarks/env_pool.py
    python benchmarks/env_pool.py --workers 2 8 --repeat 5 --kit-python KIT/bin/python
    python benchmarks/env_pool.py --sizes 64 512 4096
    python benchmarks/env_pool.py --recovery

Three kinds of callers over 64 slots: one thread (`serial`), 32 threads (`threads`), and one call
for all 64 slots (`batch`; bare Ray: 64 calls at once, then one `get`). An environment that answers
at once (and may say so), and one that takes 10 ms. Bare Ray is the plain actor for the first and
one with a thread per slot for the last. The implementations take turns, each interpreter with its
own local Ray, and the median of `--repeat` rounds is shown: compare the figures of one run only.

`--kit-python` names the interpreter of an environment with `twinkle-kit` 0.5.1 and the same Ray, to
run its pool (`initialize(mode="ray", lazy_collect=False)`) next to ours. `--sizes` measures what a
step costs in pools of these sizes, `--recovery` how long a killed worker is missed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SLOTS = 64
THREADS = 32
ACTION = {"action": "hit"}
DELAYS_S = {"instant": 0.0, "says so": 0.0, "10 ms": 0.01}  # "says so": `Env.instant`
CALLERS = ("serial", "threads", "batch")
FACTORY = "pool_tick:make_env"

KIT_WORKERS = (1, 2, 4, 8)
kit_is_ready: list[bool] = []  # it can be initialised once per process

Step = Callable[[int], Any]
Batch = Callable[[list[int]], Any]


def start_ray() -> Any:
    ray: Any = importlib.import_module("ray")
    ray.init(
        address="local",
        num_cpus=64,  # twinkle-kit wants four for each of its workers; the others do not mind
        _system_config={"prestart_worker_first_driver": False},  # or one process per CPU
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )
    return ray


def ours(
    workers: int, delay_s: float, slots: int, instant: bool = False
) -> tuple[Step, Batch, Callable[[], None]]:
    from twinkle_agentic.envs.openenv import EnvPool

    pool = EnvPool(
        slots,
        env_factory=FACTORY,
        env_kwargs={"delay_s": delay_s, "instant": instant},
        num_workers=workers,
        num_cpus=0.01,
    )
    pool.reset_batch(range(slots))

    def batch(indices: list[int]) -> Any:
        return pool.step_batch(indices, ["play"] * len(indices), [ACTION] * len(indices))

    return lambda slot: pool.step(slot, "play", ACTION), batch, pool.close


def bare(workers: int, delay_s: float, slots: int) -> tuple[Step, Batch, Callable[[], None]]:
    from pool_tick import Tick

    ray: Any = importlib.import_module("ray")

    class Actor:
        def __init__(self) -> None:
            self.envs = [Tick(delay_s) for _ in range(slots)]

        def step(self, slot: int, tool_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            result = self.envs[slot].step(arguments)
            return {"observation": result.observation, "reward": result.reward, "done": result.done}

    remote: Any = ray.remote(num_cpus=0.01, max_concurrency=-(-slots // workers) if delay_s else 1)
    actors: list[Any] = [remote(Actor).remote() for _ in range(workers)]

    ray.get([actor.step.remote(0, "play", ACTION) for actor in actors])  # all have started

    def submit(slot: int) -> Any:
        return actors[slot % workers].step.remote(slot, "play", ACTION)

    def close() -> None:
        for actor in actors:
            ray.kill(actor)

    return (
        lambda slot: ray.get(submit(slot)),
        lambda indices: ray.get([submit(slot) for slot in indices]),
        close,
    )


def kit(workers: int, delay_s: float, slots: int) -> tuple[Step, Batch, Callable[[], None]]:
    from twinkle_agentic.envs.openenv import EnvPool

    twinkle_: Any = importlib.import_module("twinkle")
    if not kit_is_ready:
        twinkle_.initialize(
            mode="ray",
            groups=[
                twinkle_.DeviceGroup(name=f"env{count}", ranks=count, device_type="CPU")
                for count in KIT_WORKERS
            ],
            ncpu_proc_per_node=sum(KIT_WORKERS),
            lazy_collect=False,
        )
        kit_is_ready.append(True)
    mesh = twinkle_.DeviceMesh.from_sizes(world_size=workers, dp_size=workers, device_type="CPU")
    make: Any = EnvPool
    pool: Any = make(
        pool_size=slots,
        device_mesh=mesh,
        env_kwargs={"env_cls": "pool_tick:Tick", "env_kwargs": {"delay_s": delay_s}},
        remote_group=f"env{workers}",
    )
    pool.reset_batch(list(range(slots)))

    def batch(indices: list[int]) -> Any:
        return pool.step_batch(indices, ["play"] * len(indices), [ACTION] * len(indices))

    return lambda slot: pool.step(slot, "play", ACTION), batch, pool.close


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"ours": ours, "ray": bare, "kit": kit}


def rate(act: Callable[[int], int], seconds: float) -> float:
    """Call `act(round)`, which returns how many steps it made, and return steps per second."""
    act(0)
    started, steps, number = time.perf_counter(), 0, 0
    while (spent := time.perf_counter() - started) < seconds:
        number += 1
        steps += act(number)
    return steps / spent


def measure(step: Step, batch: Batch, slots: int, seconds: float) -> dict[str, float]:
    everything = list(range(slots))

    def serial(number: int) -> int:
        step(number % slots)
        return 1

    def threads() -> float:
        deadline = time.perf_counter() + seconds

        def play(first: int) -> int:
            count = 0
            while time.perf_counter() < deadline:
                step((first + count * THREADS) % slots)
                count += 1
            return count

        with ThreadPoolExecutor(THREADS) as callers:
            started = time.perf_counter()
            return sum(callers.map(play, range(THREADS))) / (time.perf_counter() - started)

    def whole(_: int) -> int:
        batch(everything)
        return slots

    return {"serial": rate(serial, seconds), "threads": threads(), "batch": rate(whole, seconds)}


def serve() -> None:
    """Measure what the lines of standard input ask for, in this process with its own Ray."""
    start_ray()
    for line in sys.stdin:
        name, workers, delay, slots, seconds = json.loads(line)
        started = time.perf_counter()
        said = {"instant": True} if (name, delay) == ("ours", "says so") else {}
        step, batch, close = IMPLEMENTATIONS[name](workers, DELAYS_S[delay], slots, **said)
        ready = time.perf_counter() - started
        rates = measure(step, batch, slots, seconds)
        close()
        sys.stdout.write("RESULT " + json.dumps({**rates, "start": ready}) + "\n")
        sys.stdout.flush()


class Measurer:
    """A process that measures; it keeps its Ray until the end."""

    def __init__(self, python: str) -> None:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [python, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __call__(
        self, name: str, workers: int, delay: str, slots: int, seconds: float
    ) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, workers, delay, slots, seconds]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                figures = json.loads(line.removeprefix("RESULT "))
                sys.stderr.write(f"{name} {workers} {delay} {slots} {figures}\n")
                return figures
        raise RuntimeError(f"{name} with {workers} workers failed")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure_alone(python: str, *question: Any) -> dict[str, float]:
    """Measure in a process of its own: the actors of twinkle-kit keep their names for ever."""
    measurer = Measurer(python)
    try:
        return measurer(*question)
    finally:
        measurer.close()


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}


def compare(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    here = Measurer(sys.executable)
    measurers: dict[str, Callable[..., dict[str, float]]] = {"ours": here, "ray": here}
    if arguments.kit_python:
        measurers["kit"] = functools.partial(measure_alone, arguments.kit_python)
    for delay in arguments.delays:
        table = Table(title=f"steps/s, {SLOTS} slots, environment: {delay}")
        for heading in ("workers", "callers", "ours", "bare Ray", "twinkle-kit", "x Ray", "x kit"):
            table.add_column(heading, justify="left" if heading == "callers" else "right")
        for workers in arguments.workers:
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in measurers}
            for _ in range(arguments.repeat):
                for name, measurer in measurers.items():
                    rounds[name].append(measurer(name, workers, delay, SLOTS, arguments.seconds))
            figures = {name: median(each) for name, each in rounds.items()}
            for callers in CALLERS:
                mine, rays = figures["ours"][callers], figures["ray"][callers]
                kits = figures["kit"][callers] if "kit" in figures else None
                table.add_row(
                    str(workers),
                    callers,
                    f"{mine:,.0f}",
                    f"{rays:,.0f}",
                    "-" if kits is None else f"{kits:,.0f}",
                    f"{mine / rays:.2f}",
                    "-" if kits is None else f"{mine / kits:.2f}",
                )
        Console(width=100).print(table)
    here.close()


def sizes(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    workers = 4
    measurer = Measurer(sys.executable)
    table = Table(
        title=f"cost of one step against the size of the pool, {workers} workers, instant"
    )
    for heading in ("slots", "start s", "serial us", "threads us", "batch of all us"):
        table.add_column(heading, justify="right")
    for slots in arguments.sizes:
        figures = median(
            [
                measurer("ours", workers, "instant", slots, arguments.seconds)
                for _ in range(arguments.repeat)
            ]
        )
        table.add_row(
            str(slots),
            f"{figures['start']:.1f}",
            *(f"{1e6 / figures[callers]:,.0f}" for callers in CALLERS),
        )
    Console(width=100).print(table)
    measurer.close()


def recovery(arguments: argparse.Namespace) -> None:
    """Kill a worker with 16 slots in flight: how long until they return, and play again."""
    from rich.console import Console
    from rich.table import Table

    start_ray()
    from twinkle_agentic.envs.openenv import EnvPool

    table = Table(title="worker killed with 16 slots in flight, one of 2 workers")
    for heading in ("round", "16 results after s", "16 resets after s", "other worker's steps/s"):
        table.add_column(heading, justify="right")
    for number in range(arguments.repeat):
        with (
            EnvPool(16, None, {"delay_s": 5.0}, env_factory=FACTORY, num_workers=1) as pool,
            EnvPool(16, env_factory=FACTORY, num_workers=1) as other,
            ThreadPoolExecutor(16) as threads,
        ):
            pool.reset_batch(range(16))
            other.reset_batch(range(16))
            calls = [threads.submit(pool.step, slot, "play", ACTION) for slot in range(16)]
            while pool.stats()[0].busy < 16:
                pass
            started = time.perf_counter()
            os.kill(pool.stats()[0].pid or 0, signal.SIGKILL)
            steps = 0
            while not all(call.done() for call in calls):
                other.step(0, "play", ACTION)
                steps += 1
            returned = time.perf_counter() - started
            assert all(call.result().info["error_kind"] == "env" for call in calls)
            pool.reset_batch(range(16))
            table.add_row(
                str(number + 1),
                f"{returned:.1f}",
                f"{time.perf_counter() - started:.1f}",
                f"{steps / returned:,.0f}",
            )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--delays", nargs="+", default=list(DELAYS_S), choices=list(DELAYS_S))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", help="measure pools of these sizes instead")
    parser.add_argument("--recovery", action="store_true", help="measure a killed worker instead")
    parser.add_argument("--kit-python", help="interpreter with twinkle-kit 0.5.1 and Ray")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    elif arguments.recovery:
        recovery(arguments)
    elif arguments.sizes is not None:
        sizes(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
