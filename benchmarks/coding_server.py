"""What a session of the coding server costs: creating one, a step, many at once, memory.

Usage:
    python benchmarks/coding_server.py [--rounds 100] [--workers 1] [--stock PYTHON]

Starts the server in a process of its own on loopback and talks to it over a bare WebSocket, so that
the client costs little. Budgets of the design: a new session 10 ms median, warm; a step 2 ms;
12 MB of memory for each of 256 sessions. OpenEnv's own `coding_env` is on no package index: to
measure it beside this one, install it from a checkout into an environment of its own and give that
environment's interpreter as `--stock`. It holds one session.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect

PRINT = "print(1 + 1)"
BUSY = "t = 0\nfor i in range(6_000_000): t += i"
STOCK = "coding_env.server.app:app"


@contextlib.contextmanager
def server(command: list[str]) -> Generator[tuple[str, int, float]]:
    """Run a server; give its address, its process id and the seconds until it served."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            found = re.search(r"running on http://([\d.:]+)", line)
            address = found.group(1) if found else address
            if "startup complete" in line and address:
                break
            if found and "startup" not in line and "Press" in line and STOCK in command:
                break
        if not address:
            raise RuntimeError("the server ended before it listened")
        # It would stop at a full pipe: OpenEnv's server prints each step.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield f"ws://{address}/ws", process.pid, time.perf_counter() - begun
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(ws: ClientConnection, kind: str, **data: str) -> None:
    await ws.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await asyncio.wait_for(ws.recv(), 120))
    assert answer["type"] == "observation", answer


@contextlib.asynccontextmanager
async def sessions(url: str, count: int) -> AsyncGenerator[list[ClientConnection]]:
    async with contextlib.AsyncExitStack() as stack:
        made: list[ClientConnection] = []
        for _ in range(count):
            ws = await stack.enter_async_context(connect(url, proxy=None, open_timeout=60))
            await ask(ws, "reset")
            made.append(ws)
        yield made


async def timed(action: Callable[[], Awaitable[object]], rounds: int) -> list[float]:
    samples: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await action()
        samples.append((time.perf_counter() - begun) * 1000)
    return samples


async def print_steps(ws: ClientConnection, rounds: int) -> list[float]:
    return await timed(lambda: ask(ws, "step", code=PRINT), rounds)


def spread(samples: list[float]) -> str:
    ordered = sorted(samples)
    return f"{statistics.median(ordered):.2f} / {ordered[int(len(ordered) * 0.99)]:.2f}"


def memory_mb(pid: int) -> float:
    """Return the memory of a process and all its descendants; what they share counts once."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    todo, total = [pid], 0
    while todo:
        one = todo.pop()
        todo += children.get(one, [])
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss: +(\d+)", Path(f"/proc/{one}/smaps_rollup").read_text(), re.M)
            total += int(found.group(1)) if found else 0
    return total / 1024


async def measure(url: str, pid: int, rounds: int, counts: list[int]) -> dict[str, str]:
    rows: dict[str, str] = {}

    async def new_session() -> None:
        async with connect(url, proxy=None) as ws:
            await ask(ws, "reset")

    rows["new session (connect, reset), ms p50 / p99"] = spread(await timed(new_session, rounds))

    async def paced() -> None:
        async with connect(url, proxy=None) as ws:
            begun = time.perf_counter()
            await ask(ws, "reset")
            resets.append((time.perf_counter() - begun) * 1000)
        await asyncio.sleep(0.05)  # spares are made meanwhile

    resets: list[float] = []
    await timed(paced, rounds // 2)
    rows["reset 20 times a second, ms p50 / p99"] = spread(resets)
    before = memory_mb(pid)
    for count in counts:
        async with sessions(url, count) as made:
            each = max(4, 300 // count)
            samples: list[float] = []
            begun = time.perf_counter()

            for taken in await asyncio.gather(*(print_steps(ws, each) for ws in made)):
                samples += taken
            rate = count * each / (time.perf_counter() - begun)
            rows[f"{count} sessions: step, ms p50 / p99"] = spread(samples)
            rows[f"{count} sessions: steps / s"] = f"{rate:,.0f}"
            rows[f"{count} sessions: MB each"] = f"{(memory_mb(pid) - before) / count:.1f}"
    if max(counts) > 1:
        async with sessions(url, 2) as (one, two):
            alone = statistics.median(await timed(lambda: ask(one, "step", code=BUSY), 3))
            begun = time.perf_counter()
            await asyncio.gather(ask(one, "step", code=BUSY), ask(two, "step", code=BUSY))
            both = (time.perf_counter() - begun) * 1000
        rows["two busy sessions at once / one alone"] = f"{both / alone:.2f}"
    return rows


async def crowd(url: str, clients: int) -> str:
    """Run an episode of 4 steps for each of more clients than there are slots."""

    async def episode() -> bool:
        async with connect(url, proxy=None, open_timeout=120) as ws:
            await ask(ws, "reset")
            for _ in range(4):
                await ask(ws, "step", code=PRINT)
        return True

    begun = time.perf_counter()
    done = await asyncio.gather(*(episode() for _ in range(clients)), return_exceptions=True)
    return f"{sum(one is True for one in done)} of {clients} in {time.perf_counter() - begun:.1f} s"


def ours(sessions: int, *more: str) -> list[str]:
    command = [sys.executable, "-m", "openenv_server", "--port", "0"]
    return [*command, "--max-concurrent-envs", str(sessions), *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--stock", help="an interpreter that has OpenEnv's coding_env installed")
    options = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    more = ["--workers", str(options.workers), "--spares", "8"]
    numpy = ["--packages", "numpy", "--preload", "numpy"]
    for name, extra, counts in (
        ("cpython", [], options.counts),
        ("with numpy preloaded", numpy, options.counts[-1:]),
    ):
        with server(ours(max(counts), *more, *extra)) as (url, pid, start_s):
            rows = asyncio.run(measure(url, pid, options.rounds, counts))
        columns[name] = {"start, s": f"{start_s:.1f}"} | rows
    with server(ours(32, *more)) as (url, _, _):
        columns["cpython"]["128 clients for 32 slots: episodes"] = asyncio.run(crowd(url, 128))
    if options.stock:
        stock = [options.stock, "-m", "uvicorn", STOCK, "--port", "0"]
        with server(stock) as (url, pid, start_s):
            rows = asyncio.run(measure(url, pid, options.rounds, [1]))
        columns["stock coding_env"] = {"start, s": f"{start_s:.1f}"} | rows
    table = Table("", *columns)
    for label in dict.fromkeys(label for rows in columns.values() for label in rows):
        table.add_row(label, *(rows.get(label, "") for rows in columns.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
