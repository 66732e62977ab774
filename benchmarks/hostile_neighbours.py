"""What hostile programs cost their neighbours: the step latency of eight sessions, idle and beside.

Usage:
    python benchmarks/hostile_neighbours.py [--rounds 2] [--seconds 3]

A coding server of its own; eight sessions step ten times a second each. First alone, then beside
each hostile program of the server's tests, which runs again and again for the given seconds, then
alone again. Budget: the 99th percentile beside them is within 3 times that of the idle server, each
program by itself counted, and no neighbour loses its names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

from coding_server import server, sessions
from rich.console import Console
from rich.progress import track
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect

ROOT = Path(__file__).parents[1]
HOSTILE: dict[str, tuple[str, set[str]]] = runpy.run_path(
    str(ROOT / "services/openenv_server/tests/hostile_programs.py")
)["HOSTILE"]
NEIGHBOURS = 8
STEP_INTERVAL_S = 0.1
START_S = 1.0  # of an attacking process, whose imports would be measured too


async def step(ws: ClientConnection, code: str) -> str:
    await ws.send(json.dumps({"type": "step", "data": {"code": code}}))
    answer = json.loads(await asyncio.wait_for(ws.recv(), 120))
    return answer["data"]["observation"]["stdout"]


async def neighbours(held: list[ClientConnection], seconds: float) -> list[float]:
    """Step each session; return the latencies in milliseconds."""
    samples: list[float] = []

    async def one(number: int, ws: ClientConnection) -> None:
        await asyncio.sleep(STEP_INTERVAL_S * number / len(held))
        until = time.perf_counter() + seconds
        while (begun := time.perf_counter()) < until:
            printed = await step(ws, "print(x)")
            took = time.perf_counter() - begun
            samples.append(took * 1000)
            if printed != f"{number}\n":
                raise RuntimeError(f"neighbour {number} printed {printed!r}")
            await asyncio.sleep(max(0.0, STEP_INTERVAL_S - took))

    async with asyncio.TaskGroup() as group:
        for number, ws in enumerate(held):
            group.create_task(one(number, ws))
    return samples


async def attack(url: str, name: str) -> None:
    """Run a hostile program again and again."""
    code, _ = HOSTILE[name]
    async with connect(url, proxy=None, open_timeout=60, max_size=None) as ws:
        await ws.send(json.dumps({"type": "reset", "data": {}}))
        await ws.recv()
        while True:
            await ws.send(json.dumps({"type": "step", "data": {"code": code}}))
            await ws.recv()


@contextlib.contextmanager
def attacker(url: str, name: str) -> Generator[None]:
    """Attack from a process of its own, whose work delays no measurement."""
    process = subprocess.Popen([sys.executable, __file__, "--attack", url, name])
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"the attack {name!r} ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


async def measure(url: str, rounds: int, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"idle": []}
    async with sessions(url, NEIGHBOURS) as held:
        for number, ws in enumerate(held):
            await step(ws, f"x = {number}")
        for _ in range(rounds):
            found["idle"] += await neighbours(held, 3 * seconds)
            for name in track(HOSTILE, "beside"):
                with attacker(url, name):
                    await asyncio.sleep(START_S)
                    found.setdefault(name, []).extend(await neighbours(held, seconds))
        found["idle"] += await neighbours(held, 3 * seconds)
    return found


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--attack", nargs=2, metavar=("URL", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(*options.attack))
    command = [sys.executable, "-m", "openenv_server", "--port", "0", "--step-timeout-s", "1.5"]
    command += ["--memory-mb", "128", "--processes", "16"]
    with server(command) as (url, _, _):
        found = asyncio.run(measure(url, options.rounds, options.seconds))
    idle = p99(found["idle"])
    table = Table("beside", "steps", "median, ms", "p99, ms", "p99 / idle")
    for name, samples in sorted(found.items(), key=lambda item: -p99(item[1])):
        ratio = p99(samples) / idle
        row = (f"{statistics.median(samples):.1f}", f"{p99(samples):.1f}", f"{ratio:.2f}")
        table.add_row(name, str(len(samples)), *row)
    Console(width=100).print(table)
    everything = [one for name, samples in found.items() if name != "idle" for one in samples]
    print(f"all hostile together: p99 {p99(everything):.1f} ms, {p99(everything) / idle:.2f}x idle")


if __name__ == "__main__":
    main()
