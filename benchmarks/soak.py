"""Load the coding server with well-behaved and ill-behaved clients, and see that nothing is left.

Usage:
    python benchmarks/soak.py [--seconds 300] [--clients 50] [--sessions 16] [--workers 2]

More clients than sessions play episodes on a server of its own: steps whose answers are checked,
endless loops, crashes, memory and output bombs, clients that go away in the middle of a step. From
outside, processes of sessions are killed, and once a minute a worker. After a warm-up and again at
the end, with no client left, sessions, processes, open descriptors, memory and temporary files are
counted. The exit code is 1 when an answer was wrong or missing, or when more is left at the end
than after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from twinkle_agentic.envs.errors import TwinkleEnvError
from twinkle_agentic.envs.openenv import OpenEnvClient

_PR_SET_CHILD_SUBREAPER = 36
_STEP_TIMEOUT_S = 2
_ANSWER_LIMIT_S = 90.0
_SETTLE_S = 30.0
_MIB = 1 << 20
_LOST = (TwinkleEnvError, WebSocketException, OSError)
_EPISODES = {"correct": 10, "endless": 2, "crash": 3, "vanish": 2, "leave_the_queue": 1}
"""Kinds of episodes, methods of `Load`, and how often each is drawn."""

ENDLESS = ["while True: pass", "import time\ntime.sleep(1000)", "sum(range(10**11))"]
CRASHES = [
    "import os\nos._exit(1)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "import ctypes\nctypes.string_at(0)",
    "x = []\nwhile True: x.append(bytes(10**7))",
    "while True: print('x' * 10**6)",
    "import subprocess\n[subprocess.Popen(['sleep', '1000']) for _ in range(5)]",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What the server holds."""

    sessions: int
    queue: int
    processes: int
    descriptors: int
    memory_mib: float
    temporary_files: int


class Server:
    """The server, its processes, and where it keeps its files."""

    def __init__(self, sessions: int, workers: int, folder: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "openenv_server", "--port", "0"),
                *("--workers", str(workers), "--max-concurrent-envs", str(sessions)),
                *("--step-timeout-s", str(_STEP_TIMEOUT_S), "--queue-timeout-s", "60"),
                *("--drain-timeout-s", "5"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        self.url = ""
        self.errors: Counter[str] = Counter()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._ready.wait(90) or not self.url:
            self.stop()
            raise RuntimeError("the server did not start")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"running on (\S+)", line)
            self.url = found.group(1) if found else self.url
            if " ERROR " in line or line.startswith("Traceback"):
                self.errors[re.sub(r"\b[0-9a-f]{12}\b|\d+", "N", line.strip())[-150:]] += 1
            if "startup complete" in line:
                self._ready.set()
        self._ready.set()

    def tree(self) -> list[int]:
        """Return the processes of the server; orphans included, for this process adopts them."""
        found: list[int] = []
        waiting = [os.getpid()]
        while waiting:
            pid = waiting.pop()
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
                    waiting += map(int, children)
                    found += map(int, children)
            except OSError:  # it has ended
                continue
        return found

    def workers(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def capacity(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/capacity", timeout=30) as answer:
            return json.load(answer)

    def left(self) -> Left:
        descriptors, memory = 0, 0.0
        alive = 0
        for pid in self.tree():
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z":
                    continue
                descriptors += len(os.listdir(f"/proc/{pid}/fd"))
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                memory += int(rollup.partition("Pss:")[2].split()[0]) / 1024
                alive += 1
            except OSError:
                continue
        said = self.capacity()
        names = [name for _, folders, found in os.walk(self.folder) for name in folders + found]
        # A worker that was killed leaves its counts, in two files, to those of the server.
        files = sum(not name.endswith(".db") for name in names)
        return Left(
            sessions=said["sessions"],
            queue=said["queue"],
            processes=alive,
            descriptors=descriptors,
            memory_mib=memory,
            temporary_files=files,
        )

    def stop(self) -> float:
        """End it by SIGTERM; give the seconds that took."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        return time.monotonic() - begun


class Load:
    """The clients."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lost = 0

    def unfinished(self) -> list[str]:
        """Name the kinds of episodes that never came to their end, and too many that were lost."""
        never = [name for name in _EPISODES if not self.seen[name]]
        problems = [f"no episode of the kind {name} came to its end" for name in never]
        whole = sum(self.seen[name] for name in _EPISODES)
        if self.lost > whole * 0.05:
            problems.append(f"{self.lost} episodes were lost, {whole} came to their end")
        return problems

    async def client(self, until: float) -> None:
        while time.monotonic() < until:
            (name,) = self.draw.choices(list(_EPISODES), list(_EPISODES.values()))
            try:
                async with asyncio.timeout(_ANSWER_LIMIT_S):
                    await getattr(self, name)()
                self.seen[name] += 1
            except TimeoutError:
                self.wrong.append(f"{name} took longer than {_ANSWER_LIMIT_S:g} s")
            except _LOST as error:  # a worker was killed, or there was no room
                self.seen[f"{type(error).__name__}: {str(error)[:60]}"] += 1
                self.lost += 1

    def env(self) -> OpenEnvClient:
        return OpenEnvClient("coding_env", base_url=self.server.url, capacity_timeout_s=60)

    async def correct(self) -> None:
        env = self.env()
        try:
            await env.areset()
            mine = self.draw.randrange(10**9)
            result = await env.astep("run_python", {"code": f"x = {mine}"})
            for _ in range(self.draw.randrange(1, 6)):
                if result.info.get("error") or result.done:
                    self.seen["said to be lost"] += 1
                    return
                result = await env.astep("run_python", {"code": "x += 1\nprint(x)"})
                mine += 1
                if "lost" in str(result.info.get("metadata")) or result.info.get("error"):
                    self.seen["said to be lost"] += 1
                    return
                if result.observation != str(mine):
                    self.wrong.append(f"expected {mine}, found {result.observation!r}")
        finally:
            await env.aclose()

    async def endless(self) -> None:
        await self.one_step(self.draw.choice(ENDLESS))

    async def crash(self) -> None:
        await self.one_step(self.draw.choice(CRASHES))

    async def one_step(self, code: str) -> None:
        env = self.env()
        try:
            await env.areset()
            await env.astep("run_python", {"code": code})
            result = await env.astep("run_python", {"code": "print('alive')"})
            # Killed from outside in this step: said as a crash, or as an error of the server.
            killed = "[crash" in result.observation or result.info.get("error")
            if not killed and "alive" not in result.observation:
                self.wrong.append(f"after {code!r} found {result.observation!r}")
        finally:
            await env.aclose()

    async def vanish(self) -> None:
        url = self.server.url.replace("http", "ws", 1) + "/ws"
        ws = await connect(url, proxy=None)
        try:
            await ws.send(json.dumps({"type": "reset", "data": {}}))
            await ws.recv()
            code = self.draw.choice(ENDLESS)
            await ws.send(json.dumps({"type": "step", "data": {"code": code}}))
            await asyncio.sleep(self.draw.random() / 2)
        finally:
            ws.transport.abort()
            await ws.close()

    async def leave_the_queue(self) -> None:
        url = self.server.url.replace("http", "ws", 1) + "/ws"
        ws = await connect(url, proxy=None)
        await asyncio.sleep(self.draw.random() / 5)
        ws.transport.abort()
        await ws.close()

    async def kills(self, until: float, every_s: float) -> None:
        """Kill a process of some session now and then, and every minute a worker."""
        next_worker = time.monotonic() + 60
        while time.monotonic() < until:
            await asyncio.sleep(every_s)
            workers = self.server.workers()
            if time.monotonic() > next_worker:
                next_worker += 60
                victim = self.draw.choice(workers)
                self.seen["workers killed"] += 1
            else:
                deep = set(self.server.tree()) - {self.server.process.pid, *workers}
                victim = self.draw.choice(sorted(deep)) if deep else 0
                self.seen["processes killed"] += 1
            if victim:
                try:
                    os.kill(victim, signal.SIGKILL)
                except OSError:
                    self.seen["had ended before"] += 1


async def _play(load: Load, clients: int, seconds: float, kill_every_s: float | None) -> None:
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(load.client(until))
        if kill_every_s:
            group.create_task(load.kills(until, kill_every_s))


async def _settle(server: Server, start: Left | None) -> Left:
    """Wait until nothing more ends, or until no more is left than at the start."""
    until = time.monotonic() + _SETTLE_S
    await asyncio.sleep(3)
    while True:
        left = await asyncio.to_thread(server.left)
        over = time.monotonic() > until
        if over or (left.sessions == 0 and (start is None or not _more(left, start))):
            return left
        await asyncio.sleep(1)


def _more(end: Left, start: Left) -> list[str]:
    limits = {
        "sessions": 0.0,
        "queue": 0.0,
        "processes": start.processes,
        "descriptors": start.descriptors + 10,  # connections of HTTP that are kept alive
        "memory_mib": start.memory_mib * 1.15 + 20,  # what the allocator keeps
        "temporary_files": start.temporary_files,
    }
    return [name for name, limit in limits.items() if getattr(end, name) > limit]


def _remaining(server: Server) -> list[str]:
    """Return the command lines of processes that outlive the server."""
    until = time.monotonic() + 5
    while (found := server.tree()) and time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans that were adopted and have ended
                pass
        time.sleep(0.1)
    return [Path(f"/proc/{pid}/cmdline").read_text()[:150] for pid in found]


async def _soak(options: argparse.Namespace, folder: str) -> int:
    server = Server(options.sessions, options.workers, folder)
    try:
        load = Load(server, options.seed)
        await _play(load, options.clients, min(20.0, options.seconds), None)  # warm
        start = await _settle(server, None)
        print("after the warm-up:", start)
        await _play(load, options.clients, options.seconds, options.kill_every_s)
        end = await _settle(server, start)
        print("at the end:       ", end)
    finally:
        took_s = await asyncio.to_thread(server.stop)
    print("seen:", dict(load.seen.most_common()))
    for line, count in server.errors.most_common(10):
        print(f"{count} x {line}")
    remaining = await asyncio.to_thread(_remaining, server)
    print(f"the server ended in {took_s:.1f} s and left {len(remaining)} processes", *remaining)
    problems = [*load.wrong[:10], *load.unfinished()]
    problems += [f"more {name}" for name in _more(end, start)]
    if remaining:
        problems.append("processes that outlive the server")
    for problem in problems:
        print("PROBLEM:", problem)
    return int(bool(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every-s", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        code = asyncio.run(_soak(options, folder))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
