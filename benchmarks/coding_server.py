"""What a session of the coding server costs: start, connect, step; one at a time and 32 at once.

Usage:
    python benchmarks/coding_server.py [--rounds 200] [--sessions 32]

Starts the server in a process of its own on loopback, once per executor, and talks to it over a
bare WebSocket, so that the client costs little. Budget of the design: a new session <= 10 ms
median, warm.
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
import time
from collections.abc import Awaitable, Callable, Generator

from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import ClientConnection, connect

LOOP = "t = 0\nfor i in range(1000): t += i\nprint(t)"


@contextlib.contextmanager
def server(executor: str, sessions: int) -> Generator[tuple[str, float]]:
    """Run a server; give its address and the seconds until it listened."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "openenv_server", "--port", "0", "--executor", executor),
            *("--max-concurrent-envs", str(sessions)),
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"running on http://([\d.:]+)", line)
            if found:
                yield f"ws://{found.group(1)}/ws", time.perf_counter() - begun
                return
        raise RuntimeError("the server ended before it listened")
    finally:
        process.terminate()
        process.wait()


async def ask(ws: ClientConnection, kind: str, **data: str) -> None:
    await ws.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await ws.recv())
    assert answer["type"] == "observation", answer


async def timed(action: Callable[[], Awaitable[object]], rounds: int) -> list[float]:
    samples: list[float] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await action()
        samples.append((time.perf_counter() - begun) * 1000)
    return samples


def spread(samples: list[float]) -> str:
    ordered = sorted(samples)
    return f"{statistics.median(ordered):.2f} / {ordered[int(len(ordered) * 0.99)]:.2f}"


async def measure(url: str, rounds: int, sessions: int) -> list[str]:
    async def new_session() -> None:
        async with connect(url, proxy=None) as ws:
            await ask(ws, "reset")

    rows = [spread(await timed(new_session, rounds))]
    async with contextlib.AsyncExitStack() as stack:
        ws = await stack.enter_async_context(connect(url, proxy=None))
        await ask(ws, "reset")
        rows.append(spread(await timed(lambda: ask(ws, "step", code="print(1 + 1)"), rounds)))
        rows.append(spread(await timed(lambda: ask(ws, "step", code=LOOP), max(20, rounds // 5))))
        others = [
            await stack.enter_async_context(connect(url, proxy=None)) for _ in range(sessions - 1)
        ]
        begun = time.perf_counter()
        each = 50
        await asyncio.gather(
            *(
                timed(lambda one=one: ask(one, "step", code="print(1 + 1)"), each)
                for one in [ws, *others]
            )
        )
        rows.append(f"{sessions * each / (time.perf_counter() - begun):,.0f} / s")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=32)
    options = parser.parse_args()
    labels = [
        "start, s",
        "new session (connect, reset), ms p50 / p99",
        "step print(1 + 1), ms p50 / p99",
    ]
    labels += [
        "step with 1,000 loop passes, ms p50 / p99",
        f"steps of {options.sessions} sessions at once",
    ]
    table = Table("", "strict", "stock")
    columns: list[list[str]] = []
    for executor in ("strict", "stock"):
        with server(executor, options.sessions) as (url, start_s):
            rows = asyncio.run(measure(url, options.rounds, options.sessions))
        columns.append([f"{start_s:.1f}", *rows])
    for row in zip(labels, *columns, strict=True):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
