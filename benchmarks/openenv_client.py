"""`OpenEnvClient` next to a bare websocket with the same JSON: CPU per step, threads, start-up.

Run: python benchmarks/openenv_client.py [--steps 2000] [--sessions 1 100 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rich.console import Console
from rich.table import Table

SERVER = """
import asyncio, json, sys
from websockets.asyncio.server import serve

async def session(socket):
    async for frame in socket:
        message = json.loads(frame)
        if message["type"] == "close":
            return
        text = (message.get("data") or {}).get("value", "")
        data = {"observation": {"text": text}, "reward": 1.0, "done": False}
        await socket.send(json.dumps({"type": "observation", "data": data}))

def no_schema(connection, request):
    if not request.path.endswith("/ws"):
        return connection.respond(404, "")

async def main():
    settings = {"process_request": no_schema, "compression": None, "ping_interval": None}
    async with serve(session, "127.0.0.1", 0, **settings) as server:
        print(next(iter(server.sockets)).getsockname()[1], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

asyncio.run(main())
"""
VALUE = "print(1 + 1)\n" * 8

COLD = """
import time; start = time.perf_counter()
from twinkle_agentic.envs.openenv import OpenEnvClient
imported = time.perf_counter()
OpenEnvClient(env_name="coding_env", base_url="http://127.0.0.1:1")
print(imported - start, time.perf_counter() - start)
"""


async def measured(step: Callable[[], Awaitable[Any]], steps: int) -> tuple[float, float]:
    """Return wall and CPU microseconds per step."""
    for _ in range(100):
        await step()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        await step()
    return (
        (time.perf_counter() - wall) / steps * 1e6,
        (time.process_time() - cpu) / steps * 1e6,
    )


async def bare(port: int, steps: int) -> tuple[float, float]:
    from websockets.asyncio.client import connect

    async with connect(f"ws://127.0.0.1:{port}/ws", compression=None) as socket:

        async def step() -> Any:
            await socket.send(json.dumps({"type": "step", "data": {"value": VALUE}}))
            return json.loads(await socket.recv())

        return await measured(step, steps)


async def ours(port: int, steps: int) -> tuple[float, float]:
    from twinkle_agentic.envs.openenv import OpenEnvClient

    async with OpenEnvClient("none_such", base_url=f"http://127.0.0.1:{port}", tools=[]) as env:
        await env.areset()
        return await measured(lambda: env.astep("any", {"value": VALUE}), steps)


def ours_sync(port: int, steps: int) -> tuple[float, float]:
    from twinkle_agentic.envs.openenv import OpenEnvClient

    with OpenEnvClient("none_such", base_url=f"http://127.0.0.1:{port}", tools=[]) as env:
        env.reset()
        for _ in range(100):
            env.step("any", {"value": VALUE})
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            env.step("any", {"value": VALUE})
        return (
            (time.perf_counter() - wall) / steps * 1e6,
            (time.process_time() - cpu) / steps * 1e6,
        )


async def bare_many(port: int, sessions: int, rounds: int) -> tuple[float, float, int]:
    from websockets.asyncio.client import connect

    sockets = [
        await connect(f"ws://127.0.0.1:{port}/ws", compression=None) for _ in range(sessions)
    ]

    async def episode(socket: Any) -> None:
        for _ in range(rounds):
            await socket.send(json.dumps({"type": "step", "data": {"value": VALUE}}))
            json.loads(await socket.recv())

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode(socket) for socket in sockets))
    total = sessions * rounds
    figures = (
        (time.perf_counter() - wall) / total * 1e6,
        (time.process_time() - cpu) / total * 1e6,
    )
    await asyncio.gather(*(socket.close() for socket in sockets))
    return *figures, threading.active_count() - 1


async def ours_many(port: int, sessions: int, rounds: int) -> tuple[float, float, int]:
    from twinkle_agentic.envs.openenv import OpenEnvClient

    envs = [
        OpenEnvClient("none_such", base_url=f"http://127.0.0.1:{port}", tools=[])
        for _ in range(sessions)
    ]
    await asyncio.gather(*(env.areset() for env in envs))
    threads = threading.active_count() - 1  # all but the one that the program began with

    async def episode(env: Any) -> None:
        for _ in range(rounds):
            await env.astep("any", {"value": VALUE})

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode(env) for env in envs))
    total = sessions * rounds
    figures = (
        (time.perf_counter() - wall) / total * 1e6,
        (time.process_time() - cpu) / total * 1e6,
    )
    await asyncio.gather(*(env.aclose() for env in envs))
    return *figures, threads


def cold(times: int) -> tuple[float, float]:
    found: list[tuple[float, float]] = []
    for _ in range(times):
        out = subprocess.run(
            [sys.executable, "-c", COLD], capture_output=True, text=True, check=True
        ).stdout.split()
        found.append((float(out[0]), float(out[1])))
    return (
        statistics.median(imported for imported, _ in found),
        statistics.median(made for _, made in found),
    )


def child(what: str, port: int, sessions: int, steps: int) -> list[float]:
    """Measure in a fresh process, so that one figure does not warm up another."""
    out = subprocess.run(
        [sys.executable, __file__, "--child", what, str(port), str(sessions), str(steps)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return json.loads(out.splitlines()[-1])


def run_child(what: str, port: int, sessions: int, steps: int) -> None:
    from twinkle_agentic._aio.loop import run_sync

    result: Any
    match what:
        case "bare":
            result = asyncio.run(bare(port, steps))
        case "in a rollout":  # which runs on the loop that the clients have
            result = run_sync(ours(port, steps))
        case "on a loop of its own":
            result = asyncio.run(ours(port, steps))
        case "synchronous":
            result = ours_sync(port, steps)
        case "many bare":
            result = asyncio.run(bare_many(port, sessions, steps))
        case "many in a rollout":
            result = run_sync(ours_many(port, sessions, steps))
        case _:
            result = asyncio.run(ours_many(port, sessions, steps))
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the single session")
    parser.add_argument("--sessions", type=int, nargs="*", default=[1, 100, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, *numbers = arguments.child
        run_child(what, *map(int, numbers))
        return

    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        port = int(server.stdout.readline())

        def medians(what: str, sessions: int, steps: int) -> list[float]:
            runs = [child(what, port, sessions, steps) for _ in range(arguments.repeats)]
            return [statistics.median(column) for column in zip(*runs, strict=True)]

        table = Table(title="one session, one step after another (medians)")
        for column in ("", "us wall", "us CPU", "CPU / bare"):
            table.add_column(column, justify="right")
        kinds = ("bare", "in a rollout", "on a loop of its own", "synchronous")
        rows = {name: medians(name, 1, arguments.steps) for name in kinds}
        for name, (wall, cpu) in rows.items():
            table.add_row(name, f"{wall:.0f}", f"{cpu:.0f}", f"{cpu / rows['bare'][1]:.2f}")
        Console().print(table)

        table = Table(title="many sessions at once (medians)")
        for column in ("sessions", "", "us wall/step", "us CPU/step", "CPU / bare", "threads"):
            table.add_column(column, justify="right")
        for sessions in arguments.sessions:
            steps = max(10_000 // sessions, 5)
            kinds = ("bare", "in a rollout", "on a loop of its own")
            rows = {name: medians(f"many {name}", sessions, steps) for name in kinds}
            for name, (wall, cpu, threads) in rows.items():
                table.add_row(
                    str(sessions),
                    name,
                    f"{wall:.0f}",
                    f"{cpu:.0f}",
                    f"{cpu / rows['bare'][1]:.2f}",
                    f"{threads:.0f}",
                )
        Console().print(table)

        imported, made = cold(arguments.repeats)
        Console().print(
            f"cold interpreter: import {imported:.3f} s, import and constructor {made:.3f} s"
        )
    finally:
        server.stdin.close()
        server.wait(10)


if __name__ == "__main__":
    main()
